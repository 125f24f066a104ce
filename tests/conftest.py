"""Shared by all tests: the repository on the path, and tiny random targets saved as Hugging Face folders."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("no deadline")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes of real processes; launch/test.sh leaves it out unless told otherwise")


def _random_target(kind: str):
    """A causal language model of 8 narrow layers in fp32, with no weight left at its initial 0 or 1."""
    import transformers

    family = {"qwen3": "Qwen3", "llama": "Llama", "llama-tied": "Llama", "gemma2": "Gemma2"}[kind]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, dtype="float32", eos_token_id=1,
        tie_word_embeddings=kind in ("llama-tied", "gemma2"),
    )  # fmt: skip
    if kind == "gemma2":
        config.sliding_window, config.final_logit_softcapping = 8, 3.0
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    """kind ('qwen3', 'llama', 'llama-tied', 'gemma2') -> folder with config, safetensors and the byte tokenizer."""
    from train_dflash_pipeline import byte_tokenizer

    folders = {}

    def folder(kind: str) -> str:
        if kind not in folders:
            folders[kind] = str(tmp_path_factory.mktemp(kind))
            _random_target(kind).save_pretrained(folders[kind])
            byte_tokenizer().save_pretrained(folders[kind])
        return folders[kind]

    return folder
