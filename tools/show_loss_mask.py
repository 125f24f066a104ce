"""Show what is trained on: rows as token ids see them, supervised tokens marked.

    # the first three rows of the demo's data
    python tools/show_loss_mask.py launch/demo_train.jsonl.gz

    # rows 17 and 40 for another target, with its reasoning turned off
    python tools/show_loss_mask.py chats.jsonl --target Qwen/Qwen3-8B --row 17 40 \\
        --chat-template-kwargs '{"enable_thinking": false}'

    # a file of tools/prepare_data.py
    python tools/show_loss_mask.py qwen3-8b.safetensors --target Qwen/Qwen3-8B

On a terminal supervised tokens are green and special tokens bold; elsewhere, or where NO_COLOR is set, supervised
stretches stand in ⟦brackets⟧. A row that is left out is shown by its reason. Rows count from 0, over all files.
"""

import argparse
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Iterator

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError

GREEN, BOLD, DIM, RESET = "\x1b[32m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def visible(text: str) -> str:
    """Control characters as escapes, so that data cannot steer the terminal; line feeds and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found.group()):02x}", text)


def marked(token_ids: np.ndarray, mask: np.ndarray, tokenizer, special_ids: set[int], colour: bool) -> str:
    """The decoded tokens of one document, supervised and special ones marked."""
    text = ""
    for supervised, stretch in itertools.groupby(zip(token_ids.tolist(), mask.tolist()), key=lambda pair: pair[1]):
        parts = ""
        for special, pairs in itertools.groupby(stretch, key=lambda pair: pair[0] in special_ids):
            part = visible(tokenizer.decode([token_id for token_id, _ in pairs], skip_special_tokens=False))
            style = (GREEN if supervised else "" if special else DIM) + (BOLD if special else "")
            parts += f"{style}{part}{RESET}" if colour else part
        text += parts if colour or not supervised else f"⟦{parts}⟧"
    return text


def rows_of_jsonl(paths: list[str], wanted, chat) -> Iterator[tuple[int, list, list[str]]]:
    """(row number, its documents, why others are left out) of the wanted rows that the files have, in order."""
    last = max(wanted)
    for number, line in enumerate(pipeline.read_lines(paths)):
        if number in wanted:
            yield number, *chat.documents(pipeline.parse_row(*line))
        if number == last:
            return


def rows_of_prepared(documents, wanted) -> Iterator[tuple[int, list, list[str]]]:
    """The same from a prepared file, which does not say of each row why it was left out."""
    for number in sorted(wanted):
        if number < documents.num_rows:
            first, end = np.searchsorted(documents.rows, [number, number + 1])
            places = [slice(*documents.offsets[i : i + 2]) for i in range(first, end)]
            found = [(documents.token_ids[place], documents.loss_mask[place]) for place in places]
            yield number, found, [] if found else ["when the file was prepared"]


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSONL files (.gz too) of chats, or one prepared file")
    parser.add_argument("--target", default="auto", help="whose tokenizer: a folder or hub id, as in the run")
    parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer, where it is not the target's own")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the tokenizer")
    parser.add_argument("--num-rows", type=int, default=3, help="how many rows, from the first")
    parser.add_argument("--row", type=int, nargs="+", metavar="I", help="these rows instead")
    parser.add_argument("--max-document-tokens", type=int, help="say where a document is longer (default: any length)")
    parser.add_argument("--cut-off-answers", choices=["keep", "drop"], default="keep",
                        help="rows whose finish_reason is 'length': without an end of turn, or left out")  # fmt: skip
    parser.add_argument("--chat-template-kwargs", metavar="JSON", help="object of variables for the chat template")
    args = parser.parse_args(argv)
    for path in args.files:
        if not Path(path).is_file():
            raise UserError(f"{path}: no such file")
    if args.num_rows < 1 or min(args.row or [0]) < 0:
        raise UserError("--num-rows must be at least 1, and rows count from 0")
    return args


def main(argv=None) -> None:
    args = parse_arguments(argv)
    template_kwargs = pipeline.parse_template_kwargs(args.chat_template_kwargs)
    prepared = pipeline.is_prepared(args.files)
    target = pipeline.TargetArguments(args.target, args.tokenizer, trust_remote_code=args.trust_remote_code)
    if args.tokenizer is None:
        pipeline.choose_target(target)
    tokenizer = pipeline.load_tokenizer(target)
    chat = pipeline.ChatTokenizer(tokenizer, args.max_document_tokens, args.cut_off_answers, template_kwargs)
    wanted = range(args.num_rows) if args.row is None else set(args.row)
    if prepared:
        documents, _ = pipeline.open_documents(args.files[0])
        pipeline.check_prepared(args.files[0], {"tokenizer": chat.describe()["tokenizer"]})
        rows = rows_of_prepared(documents, wanted)
    else:
        rows = rows_of_jsonl(args.files, wanted, chat)
    sys.stdout.reconfigure(errors="backslashreplace")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    found = set()
    for number, kept, reasons in rows:
        found.add(number)
        for token_ids, mask in kept:
            print(f"--- row {number}: {len(token_ids):,} tokens, {int(mask.sum()):,} supervised")
            print(marked(token_ids, mask, tokenizer, chat.closing_ids[0], colour))
        for reason in reasons:
            print(f"--- row {number}: left out: {reason}")
    if missing := set(args.row or []) - found:
        raise UserError(f"there is no row {min(missing)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os._exit(0)
