"""Which models `adafactor plan` knows: files of a config, and presets with their models' true sizes."""

from __future__ import annotations

import importlib.util
import json
import sys
from math import prod
from pathlib import Path

import pytest

from adafactor import cli, plan
from adafactor.planning import PRESETS
from adafactor.planning.models import find


def test_a_config_is_built_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 3, "n_embd": 24, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if importlib.util.find_spec("transformers"):
        result = plan(tmp_path / "config.json")
        assert result.parameters == 50257 * 24 + 1024 * 24 + 3 * (12 * 24 * 24 + 13 * 24) + 2 * 24
        assert find(str(tmp_path)).weights[0].uses == 2
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"config\.json needs transformers"):
        plan(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "no model_type"), ('{"model_type": "abacus"}', "no model_type 'abacus'")],
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    if "abacus" in text:
        pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        plan(tmp_path / "config.json")


@pytest.mark.parametrize("size", ["-24", '"wide"'])
def test_a_size_that_is_none_is_told_in_one_line(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": ' + size + "}")
    assert cli.main(["plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"adafactor plan: {path}: transformers cannot build it: ") and err.count("\n") == 1


COUNTS = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "llama-1b": 1235814400,
    "llama-3b": 3212749824,
    "llama-7b": 6738415616,
    "llama-8b": 8030261248,
    "llama-13b": 13015864320,
    "llama-70b": 70553706496,
    "llama-405b": 405853388800,
    "mistral-7b": 7241732096,
}


def test_the_presets_have_their_models_size() -> None:
    assert {name: sum(map(prod, build())) for name, build in PRESETS.items()} == COUNTS
