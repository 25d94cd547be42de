#!/usr/bin/env bash
# SGLang's model runner on one GPU, a Llama of 8B: decode steps and greedy tokens with kernelhub's attention and with
# SGLang's own Triton kernels.
#
#   SGLANG_SITE=FOLDER OUT=FOLDER scripts/sglang_on_gpu.sh
#
# SGLANG_SITE is a folder with SGLang and what it needs beside torch, or an archive of one (tar.xz); without it, an
# installed SGLang is taken. FlashInfer is not needed. Both start at once, for LIMIT seconds (240) at most, and measure one
# after the other; the first one begins 60 % of LIMIT after the start at the latest. OUT/sglang.json has the runs of
# benchmarks/sglang_engine.py; OUT/*.log what each printed. The GPU needs 100 GB for both.
set -uo pipefail

: "${OUT:=build/sglang_on_gpu}" "${LIMIT:=240}" "${SGLANG_SITE:=}"
began=$SECONDS
start=$(date +%s)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT" "$work/llama8b"
. "$(dirname "$0")/engine_site.sh"
engine_site SGLANG_SITE sglang.srt.plugins kernelhub.compat.sglang.plugin "$work" sglang sgl_kernel || exit 1
cat >"$work/llama8b/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0, "vocab_size": 128256, "rms_norm_eps": 1e-5,
 "hidden_act": "silu", "max_position_embeddings": 131072, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": false,
 "torch_dtype": "bfloat16", "dtype": "bfloat16", "attention_bias": false, "mlp_bias": false}
JSON
python3 benchmarks/whole_tokenizer.py "$work/llama8b" >/dev/null || exit 1 # SGLang's start reads one
echo "ready after $((SECONDS - began)) s"

one() { # attention backend
    timeout -k 2 "$((LIMIT - SECONDS + began))" python3 benchmarks/sglang_engine.py --model "$work/llama8b" --backend "$1" --weights copying \
        --server '{"max_total_tokens": 90000, "mem_fraction_static": 0.7}' --turns "$work/turns:2:$((start + 6 * LIMIT / 10))" \
        --out "$OUT/sglang.$1.json" >"$OUT/sglang.$1.log" 2>&1
    local code=$?
    echo "$1: exit $code after $((SECONDS - began)) s"
    [ $code = 0 ] || grep -vE "INFO|^$" "$OUT/sglang.$1.log" | tail -6 | cut -c1-300
}

one kernelhub &
one triton &
wait
python3 - "$OUT" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
runs = {}
for path in sorted(folder.glob("sglang.*.json")):
    runs |= json.loads(path.read_text())
(folder / "sglang.json").write_text(json.dumps(runs, indent=1) + "\n")
PYTHON
python3 benchmarks/sglang_engine.py --out "$OUT/sglang.json" --show | cut -c1-400
