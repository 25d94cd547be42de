#!/usr/bin/env bash
# vLLM's engine on one GPU, what no CPU shows. `attention`, the default: waits for the GPU, compilations and Python's
# time in kernelhub's calls while it serves, and greedy tokens beside TRITON_ATTN's where windows, sinks and experts take
# part. `hooks`: Llama 3.1 8B with linear layers in NVFP4 and in MXFP4, by the hooks and by vLLM's own kernels: steps,
# and greedy tokens. `writes`: the KV cache written by vLLM's kernel and by kernelhub's: bytes, Python's time, greedy
# tokens, eager steps of one engine in turn, and steps in graphs of two engines. `hosts`: on four GPUs, each engine with
# processors of its own: Python's time of attention and of writes in eager steps, and that of other backends; errors of
# attention with softcap; greedy tokens and steps in CUDA graphs with caches of fp8 by both writers, and with linear layers in
# NVFP4 and MXFP4. `quiet`: one engine with nothing beside it: its first start, Python's time of attention and of writes; then
# the same with an fp8 cache, and steps and greedy tokens with linear layers in NVFP4 and MXFP4, in turn. `served`: `vllm serve`
# of a Llama in float8 (eight layers of Llama 3.1 8B) with hooks and without, their tokens over HTTP; Gemma 2's softcap and
# windows, and a KV cache in fp8 whose scales are in the checkpoint, beside TRITON_ATTN: errors, greedy tokens. TOKENIZER is a
# folder with a tokenizer for 32000 ids or more.
#
#   VLLM_SITE=FOLDER OUT=FOLDER scripts/engines_on_gpu.sh [attention|latents|writes|hosts|served|quiet [nvfp4] [mxfp4]|hooks [nvfp4] [mxfp4]]
#
# VLLM_SITE is a folder with vLLM and what it needs beside torch, or an archive of one (tar.xz); without it, an installed
# vLLM is taken. FlashInfer is not needed. The engines share the GPU at once, until LIMIT seconds (240) after the script's
# start at most, and each has its own cache of kernelhub: engines that share one warm up in turn. Of the times of `attention` only Python's
# count. The engines of `hooks` and `writes` start at once and run their parts one after the other, 55 % of LIMIT after the
# first at the latest; one with a hook and without a warm-up runs if the one with it is not done in 75 % of LIMIT. On an H200 with
# 16 CPUs six had started after 60 s. A first start of a machine took 84 s before models were loaded, with no bytecode of
# vLLM, which is made first now. OUT/engines.json has all runs of benchmarks/vllm_engine.py; OUT/*.log what each printed.
set -uo pipefail

what=${1:-attention}
case $what in attention | latents | writes | hosts | quiet | served | hooks) ;; *) echo "attention, latents, writes, hosts, quiet, served or hooks, not $what" >&2 && exit 2 ;; esac
if [ "$what" = hosts ] && [ "$(nvidia-smi -L | wc -l)" -lt 4 ]; then echo "hosts needs four GPUs" >&2 && exit 2; fi
formats=("${@:2}")
[ ${#formats[@]} -gt 0 ] || formats=(nvfp4 mxfp4)

if [ "$what" = served ] && [ ! -f "${TOKENIZER:-}/tokenizer.json" ]; then echo "served needs TOKENIZER, a folder with tokenizer.json" >&2 && exit 2; fi

: "${OUT:=build/engines_on_gpu}" "${LIMIT:=240}" "${VLLM_SITE:=}"
began=$SECONDS
work=$(mktemp -d)
mkdir -p "$OUT"
. "$(dirname "$0")/engine_site.sh"
export VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
engine_site VLLM_SITE vllm.general_plugins kernelhub.compat.vllm.plugin "$work" vllm transformers || { rm -rf "$work" && exit 1; }
python3 - "$work" <<'PYTHON'
import json, pathlib, sys

common = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 8192, "bos_token_id": 0,
          "eos_token_id": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "dtype": "bfloat16", "attention_bias": False}
rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
models = {
    "llama8b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0, "vocab_size": 128256},
    # Heads and layers of Llama 3.1 8B; narrow, since Python's time does not depend on the width.
    "layers-of-8b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 720, "num_hidden_layers": 24,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "experts_per_token": 4,
                "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "swiglu_limit": 7.0, "initial_context_length": 4096,
                "rope_theta": 150000.0, "rope_scaling": rope, "rope_parameters": {**rope, "rope_theta": 150000.0}, "attention_bias": True},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 1000000.0},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
               "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 4, "rope_theta": 10000.0,
               "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "deepseek": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                 "v_head_dim": 128, "first_k_dense_replace": 16, "rope_theta": 10000.0},
}
models["llama8b-short"] = models["llama8b"] | {"num_hidden_layers": 8, "vocab_size": 32000}
for name, config in models.items():
    folder = pathlib.Path(sys.argv[1], name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(common | config))
PYTHON
echo "ready after $((SECONDS - began)) s"

run() { # name, seconds, options: an engine
    local name=$1 seconds=$2
    shift 2
    local pin=()
    [ -z "${PIN:-}" ] || pin=(taskset -c "$PIN")
    KERNELHUB_CACHE_DIR=$work/cache.$name timeout -k 2 "$seconds" "${pin[@]}" python3 benchmarks/vllm_engine.py --max-model-len 2048 --tag "$name" --out "$OUT/$name.json" "$@" >"$OUT/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code after $((SECONDS - began)) s"
    [ $code = 0 ] || grep -vE "INFO|^$" "$OUT/$name.log" | tail -4 | cut -c1-300
    return $code
}

attention() { # model, backend, parts, more options
    local engine='{"kernel_config": {"enable_jit_warmup": false}, "skip_tokenizer_init": true, "gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 4294967296}'
    run "${TAG:-$1}.$2" "$((LIMIT - SECONDS + began))" --model "$work/$1" --backend "$2" --eager --parts "$3" --engine "$engine" ${TURNS:+--turns "$TURNS"} "${@:4}"
}

linear() { # format, whose kernels, time of its turn at the latest
    local graphs='{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}'
    local engine='{"kernel_config": {"enable_jit_warmup": false}, "skip_tokenizer_init": true, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 6442450944, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "compilation_config": '$graphs'}'
    local count=$((3 * ${#formats[@]}))
    [ "$2" != kernelhub-unprepared ] || count=never
    run "llama8b-$1.$2" "$((LIMIT - SECONDS + began))" --model "$work/llama8b" --backend FLASH_ATTN --float4 "$1" --weights copying --engine "$engine" \
        --parts "${PARTS:-speed,tokens}" --early "${EARLY:-}" --points 1x512,16x512,64x512 --prefill 4x2048 --steps 64 --turns "${TURNS:-$work/turns:$count:$3}"
}

written() { # tag, model, whether kernelhub writes, parts, more options; of `engine` what is more
    local engine='"kernel_config": {"enable_jit_warmup": false}, "skip_tokenizer_init": true, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 3221225472, "max_num_seqs": 64, "max_num_batched_tokens": 4096'
    KERNELHUB_VLLM_WRITE_KV_CACHE=$3 run "$1" "$((LIMIT - SECONDS + began))" --model "$work/$2" --backend CUSTOM --weights copying --engine "{$engine$more}" \
        --parts "$4" --points 1x1024,16x1024,32x512 --prefill 2x1024 --steps 64 --turns "${TURNS:-$work/turns:5:$((start + 55 * LIMIT / 100))}" "${@:5}"
}

scaled() { # backend, parts: a KV cache in fp8 with the checkpoint's scales
    local engine='{"load_format": "auto", "kernel_config": {"enable_jit_warmup": false}, "skip_tokenizer_init": true, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 3221225472, "max_num_seqs": 64, "max_num_batched_tokens": 4096}'
    run "llama-fp8-scaled.$1" "$((LIMIT - SECONDS + began))" --model "$work/fp8" --backend "$1" --eager --kv-cache-dtype fp8 --engine "$engine" --parts "$2"
}

served() { # tag, port, hooks: a server, and its tokens
    local pin=() caches=$work/serve.$1 server
    [ -z "${PIN:-}" ] || pin=(taskset -c "$PIN")
    mkdir -p "$caches/tmp"
    local places=(KERNELHUB_CACHE_DIR="$caches/kernelhub" TMPDIR="$caches/tmp" VLLM_CACHE_ROOT="$caches/vllm" XDG_CACHE_HOME="$caches/xdg"
        TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton" VLLM_USE_FLASHINFER_SAMPLER=0)
    env "${places[@]}" ${3:+KERNELHUB_VLLM_HOOKS="$3"} setsid "${pin[@]}" vllm serve "$work/fp8" --attention-backend CUSTOM --port "$2" --max-model-len 2048 \
        --max-num-seqs 32 --max-num-batched-tokens 4096 --no-enable-prefix-caching --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 3221225472 \
        --kernel-config '{"enable_jit_warmup":false}' >"$OUT/$1.log" 2>&1 &
    server=$!
    timeout -k 2 "$((LIMIT - SECONDS + began))" python3 benchmarks/served_tokens.py --url "http://127.0.0.1:$2" --wait "$LIMIT" --pid "$server" --tag "$1" --out "$OUT/$1.tokens.json"
    local code=$?
    kill -TERM -- "-$server" 2>/dev/null
    sleep 1
    kill -KILL -- "-$server" 2>/dev/null
    echo "$1: exit $code after $((SECONDS - began)) s"
    [ $code = 0 ] || grep -E "Error|error" "$OUT/$1.log" | tail -4 | cut -c1-300
}

on() { # GPU, how many engines it has, which of them, command: with processors of its own
    local cpus=$(($(nproc) / 4 / $2)) first=$(($(nproc) * $1 / 4))
    first=$((first + $3 * cpus))
    CUDA_VISIBLE_DEVICES=$1 PIN=$first-$((first + cpus - 1)) TURNS=$work/turns.$1:$2:$((start + 60 * LIMIT / 100)) "${@:4}" &
}

hooked() { # format
    export KERNELHUB_VLLM_HOOKS=$1_linear
    KERNELHUB_ENGINE_WARMUP=0 linear "$1" kernelhub-unprepared $((start + 3 * LIMIT / 4)) &
    local other=$!
    if linear "$1" kernelhub $((start + 55 * LIMIT / 100)); then
        pkill -TERM -P "$other" timeout
    fi
    wait "$other"
}

start=$(($(date +%s) - SECONDS + began))
if [ "$what" = hooks ]; then
    for format in "${formats[@]}"; do
        hooked "$format" &
        linear "$format" vllm $((start + 55 * LIMIT / 100)) &
    done
elif [ "$what" = writes ]; then
    more=
    written eager.layers-of-8b layers-of-8b 1 writes --eager &
    written eager.layers-of-8b-fp8 layers-of-8b 1 writes --eager --kv-cache-dtype fp8 &
    written eager.llama8b llama8b 1 writes,tokens --eager &
    more=', "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}'
    written graphs.vllm-writes llama8b 0 speed,tokens &
    written graphs.kernelhub-writes llama8b 1 speed,tokens &
elif [ "$what" = hosts ]; then
    more=
    on 0 3 0 written eager.layers-of-8b layers-of-8b 1 writes --eager
    on 1 2 0 written eager.layers-of-8b-fp8 layers-of-8b 1 writes --eager --kv-cache-dtype fp8
    on 0 3 1 attention layers-of-8b FLASH_ATTN watch
    on 1 2 1 attention layers-of-8b TRITON_ATTN watch
    on 0 3 2 attention gemma2 CUSTOM numbers
    more=', "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}'
    on 2 3 0 written graphs.vllm-writes-fp8 llama8b 0 speed,tokens --kv-cache-dtype fp8
    on 3 3 0 written graphs.kernelhub-writes-fp8 llama8b 1 speed,tokens --kv-cache-dtype fp8
    on 2 3 1 linear nvfp4 vllm 0
    on 3 3 1 linear mxfp4 vllm 0
    KERNELHUB_VLLM_HOOKS=nvfp4_linear on 2 3 2 linear nvfp4 kernelhub 0
    KERNELHUB_VLLM_HOOKS=mxfp4_linear on 3 3 2 linear mxfp4 kernelhub 0
elif [ "$what" = quiet ]; then
    attention layers-of-8b CUSTOM hosts
    TURNS=$work/turns:$((1 + 2 * ${#formats[@]})):$((start + 80 * LIMIT / 100)) PARTS=speed EARLY=tokens
    for format in "${formats[@]}"; do
        linear "$format" vllm 0 &
        KERNELHUB_VLLM_HOOKS=${format}_linear linear "$format" kernelhub 0 &
    done
    TAG=layers-of-8b-fp8 attention layers-of-8b CUSTOM hosts --kv-cache-dtype fp8 &
elif [ "$what" = served ]; then
    cpus=$(nproc)
    hooks=0-$((cpus * 3 / 8 - 1)) plain=$((cpus * 3 / 8))-$((cpus * 5 / 8 - 1)) others=$((cpus * 5 / 8))-$((cpus - 1))
    if ! command -v vllm >/dev/null; then
        mkdir "$work/bin" && printf '#!/usr/bin/env python3\nimport sys\n\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == "__main__":\n    sys.exit(main())\n' >"$work/bin/vllm"
        chmod +x "$work/bin/vllm" && export PATH=$work/bin:$PATH
    fi
    for backend in CUSTOM TRITON_ATTN; do
        PIN=$others attention gemma2 $backend numbers,tokens --weights copying &
    done
    if python3 benchmarks/fp8_checkpoint.py --config "$work/llama8b-short/config.json" --tokenizer "$TOKENIZER" --out "$work/fp8"; then
        echo "checkpoint after $((SECONDS - began)) s"
        PIN=$hooks served serve.hooks 8101 fp8_linear,experts &
        PIN=$plain served serve.plain 8102 "" &
        PIN=$others scaled CUSTOM numbers,tokens,bytes &
        PIN=$others scaled TRITON_ATTN tokens &
    fi
elif [ "$what" = latents ]; then
    attention deepseek CUSTOM tokens --weights copying &
    attention deepseek TRITON_MLA tokens --weights copying &
else
    attention layers-of-8b CUSTOM watch &
    attention gpt-oss CUSTOM tokens --weights copying &
    attention gpt-oss TRITON_ATTN tokens --weights copying &
    attention qwen3-moe CUSTOM tokens --weights copying &
    attention qwen3-moe TRITON_ATTN tokens --weights copying &
fi
wait
python3 - "$OUT" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
runs = {}
for path in sorted(folder.glob("*.*.json")):
    if path.name.endswith(".tokens.json"):
        continue
    runs |= json.loads(path.read_text())
(folder / "engines.json").write_text(json.dumps(runs, indent=1) + "\n")
PYTHON
python3 benchmarks/vllm_engine.py --out "$OUT/engines.json" --show | cut -c1-400
if [ "$what" = served ]; then
    python3 -c 'import json, pathlib, sys
runs = {}
for path in map(pathlib.Path, sys.argv[2:]):
    runs |= json.loads(path.read_text()) if path.exists() else {}
pathlib.Path(sys.argv[1]).write_text(json.dumps(runs))' "$OUT/served.json" "$OUT"/serve.*.tokens.json
    python3 benchmarks/served_tokens.py --out "$OUT/served.json" --show
    grep -hE "Using Attention|Selected |kernelhub: (warming|ready|sealed|not ready)|[0-9]+ layers like|init engine|torch.compile took|Graph capturing" "$OUT"/serve.*.log | cut -c1-260
fi
rm -rf "$work"
