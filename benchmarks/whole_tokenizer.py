"""Give a model's folder a tokenizer that has a text for each id of its vocabulary.

    python benchmarks/whole_tokenizer.py /models/llama8b

A model of random weights makes ids of its whole vocabulary. Where a tokenizer has no text for most of them, a server
that makes text step by step starts again from the prompt at each token (tokenizers' DecodeStream: 625 us for a token
after a prompt of 8192 on one CPU, 54 with this tokenizer), so that the server's process limits what is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json")


def write(folder: Path) -> int:
    """Write both files of a tokenizer into the folder, and return the number of ids.

    Raises:
        SystemExit: the folder has no config.json, or that names no vocab_size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = folder / "config.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist: name the folder of a model")
    size = json.loads(path.read_text()).get("vocab_size")
    if not size:
        raise SystemExit(f"{path} has no vocab_size: add it")
    tokenizer = Tokenizer(models.WordLevel({f"t{at} ": at for at in range(size)}, unk_token="t0 "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / FILES[0]))
    (folder / FILES[1]).write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0 ", "eos_token": "t1 "}, indent=1)
    )
    return int(size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the model's config.json; its tokenizer is replaced")
    folder = parser.parse_args(arguments).folder
    print(f"{folder}: a text for each of {write(folder)} ids")


if __name__ == "__main__":
    main()
