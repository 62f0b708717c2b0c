"""A quantised model is answered in one line, by name or loaded, before its package or its weights are looked for."""

import json
import shutil

import pytest
import torch

from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.text.models.model_loading import check_language_model, load_language_model


@pytest.mark.parametrize(
    "settings", [{"quant_method": "gptq", "bits": 4}, {"load_in_4bit": True}, {"quant_method": "fp8"}]
)
def test_a_quantised_model_is_refused_in_one_line(settings, model_folders, tmp_path):
    folder = tmp_path / "quantised"
    shutil.copytree(model_folders["gpt2"], folder)
    lm, tokenizer = load_language_model(ModelConfig(name=str(folder)))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    lm.config.quantization_config = settings
    for load in (load_language_model, lambda args: check_language_model(args, lm, tokenizer)):
        with pytest.raises(
            ConfigError, match=f"^the weights of '{folder}' are quantised.*, and quantised models"
        ) as caught:
            load(ModelConfig(name=str(folder)))
        assert "\n" not in str(caught.value)
    assert torch.is_floating_point(next(lm.parameters()))
