"""Builders that several test files use."""

import dataclasses

import numpy as np
import torch

from train_dflash_pipeline import ARGUMENT_GROUPS, Arguments, Documents, load_target, load_target_config


def arguments(**flags) -> Arguments:
    """The default settings with some changed, by flat name."""
    names = {group: {f.name for f in dataclasses.fields(group)} for group in ARGUMENT_GROUPS}
    assert flags.keys() <= set().union(*names.values())
    return Arguments(*(group(**{k: v for k, v in flags.items() if k in names[group]}) for group in ARGUMENT_GROUPS))


def make_documents(lengths, masks=None, seed=0) -> Documents:
    """Documents of random tokens; their loss masks are given, or random runs of about five tokens."""
    rng = np.random.default_rng(seed)
    total = int(sum(lengths))
    if masks is None:
        mask = np.repeat(rng.random(total) < 0.7, rng.integers(1, 10, total))[:total]
    else:
        mask = np.concatenate([np.array(m, bool) for m in masks])
    ids = rng.integers(2, 300, total).astype(np.int32)
    return Documents(ids, mask, np.cumsum([0, *lengths]), np.arange(len(lengths)), {})


def load(folder: str):
    """(config, model) of a saved target, through the pipeline."""
    args = arguments(target=folder).target
    config = load_target_config(args)
    return config, load_target(args, config, torch.device("cpu"))
