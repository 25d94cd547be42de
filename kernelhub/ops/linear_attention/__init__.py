"""Linear attention whose state decays: `linear_attention`, for prefill and decode.

Lightning attention (TransNormerLLM, Lightning Attention-2; MiniMax-Text-01, Ring-linear-2.0) keeps a matrix per head in
place of keys and values. With lambda = exp(-decay[h]), for each token t

    state_t = lambda * state_(t-1) + k_t^T v_t
    out_t   = scale * q_t state_t

so a token's own contribution does not decay, and that of the token before it decays once. The state is float32 ``[D,
Dv]`` per head.

Files: `problem` (facets), `op` (checks, launch, the public function),
`adapter` (the interface of kernels), `reference`, `tolerance`, `inputs`, `cases`.
"""
