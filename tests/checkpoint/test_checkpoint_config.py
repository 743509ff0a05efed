"""The published forms of config.json: read without remote code, written back so that they serve."""

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import DATA, edit_json
from transformers import AutoConfig, DeepseekV3Config

from kimi_bridge.checkpoint import KimiK25Config, KimiVLConfig
from kimi_bridge.errors import CheckpointError

FORMS = ("config.json", "config.transformers5.json")
KIMI_VL = "config.kimi_vl.json"
YARN = {
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}


def make_folder(form: str, tmp_path: Path) -> Path:
    """A folder whose remote code ends the test if anybody runs it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(DATA / form, folder / "config.json")
    for name in ("configuration_kimi_k25.py", "configuration_deepseek.py", "configuration_kimi_vl.py"):
        (folder / name).write_text("raise SystemExit('remote code was run')\n")
    return folder


@pytest.fixture(params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Kimi K2.5's."""
    return make_folder(request.param, tmp_path)


@pytest.fixture(params=[*FORMS, KIMI_VL])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Each family's."""
    return make_folder(request.param, tmp_path)


@pytest.fixture
def vl_folder(tmp_path: Path) -> Path:
    return make_folder(KIMI_VL, tmp_path)


def load(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("trust_remote_code", [False, None])
def test_autoconfig_needs_no_remote_code(any_folder: Path, trust_remote_code: bool | None) -> None:
    config = AutoConfig.from_pretrained(any_folder, trust_remote_code=trust_remote_code)
    assert type(config) in (KimiK25Config, KimiVLConfig)
    assert type(config.text_config) is DeepseekV3Config
    assert config.get_text_config() is config.text_config
    assert config.tie_word_embeddings is False
    assert config.text_config.dtype == torch.bfloat16
    is_vl = isinstance(config, KimiVLConfig)
    family = "KimiVL" if is_vl else "KimiK25"
    assert config.architectures == [f"{family}ForConditionalGeneration"]
    widths = (config.text_config.hidden_size, config.text_config.n_routed_experts)
    assert widths == ((2048, 64) if is_vl else (7168, 384))


def test_kimi_vl(vl_folder: Path, tmp_path: Path) -> None:
    """No query compression, and a rotary embedding that nothing scales."""
    config = load(vl_folder)
    assert config.text_config.q_lora_rank is None
    assert config.text_config.rope_parameters == {"rope_theta": 800000.0, "rope_type": "default"}
    config.save_pretrained(tmp_path / "second")
    assert read(tmp_path / "second") == read(vl_folder)
    config.text_config.rope_parameters["rope_theta"] = 50000.0
    config.save_pretrained(tmp_path / "third")
    text = read(tmp_path / "third")["text_config"]
    assert text == read(vl_folder)["text_config"] | {"rope_theta": 50000.0}
    with pytest.raises(CheckpointError, match=r"KimiVLForConditionalGeneration: .*KimiK25ForConditional"):
        KimiK25Config(**read(vl_folder) | {"model_type": "kimi_k25"})


def test_rope_is_the_same_in_both_forms_and_under_both_names(folder: Path) -> None:
    text = load(folder).text_config
    for rope in (text.rope_parameters, text.rope_scaling):
        assert rope["rope_theta"] == 50000.0
        assert {key: rope[key] for key in YARN} == YARN
        assert rope["rope_type"] == "yarn"
    # What upstream asks first; an attribute that said otherwise would win over rope_parameters.
    assert getattr(text, "rope_theta", 50000.0) == 50000.0


def test_written_back_every_key_survives(folder: Path, tmp_path: Path) -> None:
    load(folder).save_pretrained(tmp_path / "second")
    load(tmp_path / "second").save_pretrained(tmp_path / "third")
    first, second = read(folder), read(tmp_path / "second")
    assert read(tmp_path / "third") == second
    # transformers 4 and the published remote code know rope_scaling alone.
    rope = {key: value for key, value in second["text_config"]["rope_scaling"].items() if key != "rope_type"}
    assert rope == YARN | {"type": "yarn"}
    assert second["text_config"]["rope_theta"] == 50000.0
    if "rope_scaling" not in first["text_config"]:
        del second["text_config"]["rope_scaling"]
    assert second == first


def test_changes_are_written_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    config = load(folder)
    before = config.to_dict()
    config.text_config.num_hidden_layers = 3
    config.text_config.quantization_config["config_groups"]["group_0"]["weights"]["group_size"] = 64
    config.media_placeholder_token_id = 5
    config.new_key = {"a": 1}
    config.save_pretrained(tmp_path / "changed")
    after = read(tmp_path / "changed")
    assert after["text_config"].pop("num_hidden_layers") == 3
    assert before["text_config"].pop("num_hidden_layers") == 61
    weights = after["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights.pop("group_size") == 64
    del before["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]
    assert (after.pop("media_placeholder_token_id"), after.pop("new_key")) == (5, {"a": 1})
    del before["media_placeholder_token_id"]
    assert after == before


def test_removed_quantization_config_stays_removed(folder: Path, tmp_path: Path) -> None:
    config = load(folder)
    del config.text_config.quantization_config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "plain/config.json").read_text()


def test_changed_rope_is_written_in_every_form_the_file_has(folder: Path, tmp_path: Path) -> None:
    config = load(folder)
    config.text_config.rope_parameters["factor"] = 32.0
    config.text_config.rope_parameters["rope_theta"] = 10000.0
    config.save_pretrained(tmp_path / "changed")
    text = read(tmp_path / "changed")["text_config"]
    assert (text["rope_theta"], text["rope_scaling"]["factor"]) == (10000.0, 32.0)
    assert ("rope_parameters" in text) == ("rope_parameters" in read(folder)["text_config"])
    again = load(tmp_path / "changed").text_config.rope_parameters
    assert (again["rope_theta"], again["factor"], again["mscale"]) == (10000.0, 32.0, 1.0)


def test_copies_and_dicts(any_folder: Path) -> None:
    config = load(any_folder)
    for twin in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        type(config)(**config.to_dict()),
    ):
        assert twin.to_dict() == config.to_dict() == config.to_diff_dict()
        assert twin.text_config.rope_parameters == config.text_config.rope_parameters
        twin.text_config.rope_parameters["rope_theta"] = 1.0
        twin.vision_config["patch_size"] = 1
    assert config.text_config.rope_parameters["rope_theta"] in (50000.0, 800000.0)
    assert config.vision_config == read(any_folder)["vision_config"]
    assert json.loads(config.to_json_string()) == config.to_dict()


def test_the_dicts_it_was_made_of_are_not_kept(any_folder: Path) -> None:
    content = read(any_folder)
    config = type(load(any_folder))(**content)
    before = config.to_dict()
    content["text_config"].get("quantization_config", {"ignore": []})["ignore"].append("x")
    content["vision_config"]["patch_size"] = 1
    before["vision_config"]["merge_kernel_size"].append(3)
    assert config.to_dict() == load(any_folder).to_dict()


def test_q_lora_rank_null(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", lambda config: config["text_config"].update(q_lora_rank=None))
    config = load(folder)
    assert config.text_config.q_lora_rank is None
    config.save_pretrained(tmp_path / "second")
    assert read(tmp_path / "second")["text_config"]["q_lora_rank"] is None


def test_tie_word_embeddings_counts_on_the_top_level_alone(any_folder: Path) -> None:
    path = any_folder / "config.json"
    edit_json(path, lambda config: config["text_config"].update(tie_word_embeddings=True))
    assert load(any_folder).tie_word_embeddings is False
    edit_json(path, lambda config: config.update(tie_word_embeddings=True))
    assert load(any_folder).tie_word_embeddings is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM.*KimiK25"),
        ({"text_config": None}, "has no text_config"),
        ({"text_config": {}}, "has no text_config"),
        ({"text_config": [1]}, "has no text_config"),
        (
            {"text_config": {"hidden_size": "wide"}},
            "text_config in config.json has a value that cannot be .*hidden_size",
        ),
        ({"text_config": {"rope_scaling": "yarn"}}, "text_config in config.json has a value that cannot be"),
        ({"dtype": "bfloat17"}, "^config.json has a value that cannot be .*bfloat17"),
    ],
)
def test_unusable_configs_say_why(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = json.loads((DATA / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
