"""The legend of the shape suffixes that array names carry, and that einsum strings repeat.

    T  tokens on this device               N  query heads            E  experts
    S  key positions                       K  KV heads               X  experts per token
    D  model width (hidden_size)           G  query heads per KV     F  expert width
    V  vocabulary                          H  head_dim               L  layers of a stage
    P  pipeline stages                     C  N + 2K heads of the fused projection: queries, keys, values
    B  rows of a block of a blocked loop   J  combined KV heads: keys, then values (2K)

Inside attention T, N and K count what the device holds there: all tokens of its ring rank, and its share of the heads.
"""
