"""Tokenise chat rows once, into a file that any number of runs map into memory.

    # prepared for one tokenizer, one document limit; then a run on it
    python tools/prepare_data.py --train-data chats.jsonl more.jsonl.gz --target Qwen/Qwen3-8B \\
        --max-document-tokens 2048 --output qwen3-8b.safetensors
    torchrun --nproc_per_node 8 train_dflash_pipeline.py --target Qwen/Qwen3-8B --train-data qwen3-8b.safetensors \\
        --max-document-tokens 2048 --tokens-per-micro-batch 8192

    # reasoning turned off in the template, answers that hit a length limit left out, the report as JSON too
    python tools/prepare_data.py --train-data chats.jsonl --target Qwen/Qwen3-8B --max-document-tokens 2048 \\
        --chat-template-kwargs '{"enable_thinking": false}' --cut-off-answers drop --output x.safetensors --json x.json

The file holds what a run given the JSONL files would make of them, and does not depend on --processes. It appears whole
or not at all: after a kill, the same command starts anew and ends with the same bytes. A run refuses it when its
tokenizer, chat template or settings are others. A template that writes today's date gives another file tomorrow; most
such templates take the date from --chat-template-kwargs.

A document trains if two neighbouring tokens are supervised: the first is the anchor of a block, which then has as many
trained slots as supervised tokens follow without a gap. Documents without a full block of --block-size therefore train
with shorter blocks; documents without an anchor stay in the data and weigh nothing. Both are counted in the report.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Iterator

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import Documents, UserError

PERCENTILES = (50, 90, 99, 100)


def start_worker(target, options: dict) -> None:
    """Set up a worker process: its own tokenizer, and an end when the parent's comes, even by a kill."""
    global chat
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=end_with_parent, daemon=True).start()
    chat = pipeline.ChatTokenizer(pipeline.load_tokenizer(target), **options)


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def tokenise_chunk(lines: list) -> Documents:
    return chat.tokenise_lines(lines)


def tokenise_in_processes(paths: list[str], target, options: dict, processes: int) -> Iterator[Documents]:
    """What `ChatTokenizer.tokenise_lines` makes of consecutive chunks of the files, in their order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "transformers.models.auto.tokenization_auto"])  # imported once for all
    with ProcessPoolExecutor(processes, context, start_worker, (target, options)) as pool:
        waiting, chunks = deque(), pipeline.line_chunks(paths)
        try:
            waiting.extend(pool.submit(tokenise_chunk, chunk) for chunk in itertools.islice(chunks, 4 * processes))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(tokenise_chunk, chunk) for chunk in itertools.islice(chunks, 1))
        except BrokenProcessPool:
            raise UserError("a worker process died, out of memory perhaps: try fewer --processes") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def longest_runs(documents: Documents, tokens_at_once: int = 1 << 24) -> np.ndarray:
    """int64 [count]: the most neighbouring supervised tokens of each document."""
    runs, offsets, first = [], documents.offsets, 0
    while first < len(documents):
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + tokens_at_once, "right")) - 1)
        mask = documents.loss_mask[offsets[first] : offsets[end]]
        starts, places = offsets[first:end] - offsets[first], np.arange(len(mask))
        gaps = np.where(mask, -1, places)
        gaps[starts] = starts - mask[starts]  # no run reaches back into the document before
        runs.append(np.maximum.reduceat(places - np.maximum.accumulate(gaps), starts))
        first = end
    return np.concatenate(runs)


def report(documents: Documents, block_size: int) -> dict:
    """Sizes, lengths and everything that was left out, as JSON."""
    supervised = np.add.reduceat(documents.loss_mask, documents.offsets[:-1], dtype=np.int64)
    runs = longest_runs(documents)

    def percentiles(values: np.ndarray) -> dict:
        levels = np.percentile(values, PERCENTILES, method="inverted_cdf")  # values that occur
        return {"max" if p == 100 else f"p{p}": int(level) for p, level in zip(PERCENTILES, levels)}

    return {
        "rows": documents.num_rows,
        "documents": len(documents),
        "tokens": int(documents.offsets[-1]),
        "supervised_tokens": int(supervised.sum()),
        "supervised_share": float(supervised.sum() / documents.offsets[-1]),
        "tokens_per_document": percentiles(documents.lengths),
        "supervised_tokens_per_document": percentiles(supervised),
        "block_size": block_size,
        "documents_without_full_block": int((runs < block_size).sum()),
        "documents_without_anchor": int((runs < 2).sum()),
        "dropped": documents.dropped,
        "fingerprint": documents.fingerprint,
    }


def show(figures: dict) -> None:
    print(f"rows                    {figures['rows']:,}")
    print(f"documents               {figures['documents']:,}")
    print(f"tokens                  {figures['tokens']:,}, {figures['supervised_share']:.1%} supervised")
    for label, key in (("tokens a document", "tokens"), ("supervised of them", "supervised_tokens")):
        levels = figures[f"{key}_per_document"].items()
        print(f"{label:<24}" + ", ".join(f"{name} {value:,}" for name, value in levels))
    print(f"no full block of {figures['block_size']:<7}{figures['documents_without_full_block']:,} documents")
    print(f"no anchor at all        {figures['documents_without_anchor']:,} documents")
    print(f"left out                {sum(figures['dropped'].values()):,}")
    for reason, count in figures["dropped"].items():
        print(f"  {count:>10,}  {reason}")


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-data", nargs="+", required=True, metavar="FILE", help="JSONL files (.gz too) of chats")
    parser.add_argument("--target", default="auto", help="whose tokenizer: a folder or hub id, as in the run")
    parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer, where it is not the target's own")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the tokenizer")
    parser.add_argument("--max-document-tokens", type=int, required=True, help="longer documents are left out")
    parser.add_argument("--cut-off-answers", choices=["keep", "drop"], default="keep",
                        help="rows whose finish_reason is 'length': without an end of turn, or left out")  # fmt: skip
    parser.add_argument("--chat-template-kwargs", metavar="JSON", help="object of variables for the chat template")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)),
                        help="processes that tokenise (default: one a core)")  # fmt: skip
    parser.add_argument("--block-size", type=int, default=16, help="for the report: block size of the drafter")
    parser.add_argument("--output", type=Path, required=True, help="the prepared file; its name ends in .safetensors")
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    args = parser.parse_args(argv)
    for name, least in (("max_document_tokens", 2), ("processes", 1), ("block_size", 2)):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.output.suffix != ".safetensors":
        raise UserError(f"--output {args.output}: the name must end in .safetensors")
    for flag, path in (("--output", args.output), ("--json", args.json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{flag} {path}: no such folder")
    for path in args.train_data:
        if not Path(path).is_file():
            raise UserError(f"--train-data {path}: no such file")
    if pipeline.is_prepared(args.train_data):
        raise UserError(f"--train-data {args.train_data[0]} is prepared already")
    return args


def main(argv=None) -> None:
    args = parse_arguments(argv)
    options = {
        "max_tokens": args.max_document_tokens,
        "cut_off_answers": args.cut_off_answers,
        "template_kwargs": pipeline.parse_template_kwargs(args.chat_template_kwargs),
    }
    target = pipeline.TargetArguments(args.target, args.tokenizer, trust_remote_code=args.trust_remote_code)
    if args.tokenizer is None:
        pipeline.choose_target(target)
    chat = pipeline.ChatTokenizer(pipeline.load_tokenizer(target), **options)
    parts = None
    if args.processes > 1:
        parts = tokenise_in_processes(args.train_data, target, options, args.processes)
    documents = pipeline.tokenise_rows(args.train_data, chat, show_progress=True, parts=parts)
    pipeline.write_documents(documents, args.output, chat.describe())
    figures = report(documents, args.block_size)
    show(figures)
    if args.json:
        pipeline.write_json(args.json, figures)
    print(f"written: {args.output} ({args.output.stat().st_size / 2**20:,.1f} MiB)", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
