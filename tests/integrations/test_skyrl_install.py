"""install() in processes that have other parts of SkyRL's world each, in every order of imports.

Each case has a process of its own: what is imported stays so. The cases run in whichever of the three
environments has what they need.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAVE = {name: importlib.util.find_spec(name) is not None for name in ("skyrl", "megatron", "vllm")}
SKYRL_040 = Path(sys.prefix) / "skyrl-0.4.0"

START = """
import sys
from kimi_bridge.integrations import skyrl
def say(*values): print('>>', *values)
def bridge():
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    kind = type(get_model_bridge("KimiK25ForConditionalGeneration"))
    return f"{kind.__module__.split('.')[0]}.{kind.__name__}"
"""


def run(script: str, **environment: str) -> list[str]:
    """The lines that a script prints with `say`."""
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line[3:] for line in done.stdout.splitlines() if line.startswith(">> ")]


def needs(**wanted: bool) -> pytest.MarkDecorator:
    missing = [name for name, present in wanted.items() if HAVE[name] != present]
    return pytest.mark.skipif(bool(missing), reason=f"another environment, for {', '.join(missing)}")


def test_it_imports_nothing_and_can_be_called_again() -> None:
    first, second, heavy, left = run("""
before = len(sys.meta_path)
say(skyrl.install())
say(skyrl.install())
say([name for name in ('torch', 'transformers', 'megatron', 'vllm', 'ray', 'skyrl') if name in sys.modules])
skyrl.uninstall()
skyrl.uninstall()
say(len(sys.meta_path) - before)
""")
    assert ("SkyRL is not installed here" in first) != HAVE["skyrl"]
    assert ("vLLM is not installed" in first) != HAVE["vllm"]
    if HAVE["skyrl"]:
        assert "installed for SkyRL 0.3.0; KimiK25TextBridge is in front" in first
        assert "fake_int4_quantize_ste is this library's" in first
    assert second == "kimi_bridge is installed in this process already"
    assert heavy == "[]"
    assert left == "0"


@needs(skyrl=False)
def test_a_folder_that_is_only_called_so(tmp_path: Path) -> None:
    (tmp_path / "skyrl").mkdir()
    script = f"sys.path.insert(0, {str(tmp_path)!r})\nsay(skyrl.install())\nsay(skyrl.install())"
    first, second = run(script)
    assert "for SkyRL of no known version; it was tested with 0.3.0 and 0.4.0" in first
    assert "already" in second


@needs(vllm=True, megatron=False)
def test_an_engine_has_vllm_and_no_megatron() -> None:
    before, after, taken_back, members, without = run("""
skyrl.install()
from vllm.model_executor.models.interfaces import supports_lora
from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration as Model
say('megatron' in sys.modules)
say(supports_lora(Model))
skyrl.uninstall()
say(supports_lora(Model))
names = set(vars(Model))
skyrl.install()
skyrl.uninstall()
say(set(vars(Model)) == names, supports_lora(Model))
say(skyrl.install())
""")
    assert (before, after, taken_back) == ("False", "True", "False")
    assert members == "True False"
    assert "accepts LoRA now" in without


@needs(megatron=True)
def test_a_trainer_has_megatron_and_no_vllm() -> None:
    lines = run("""
skyrl.install()
import megatron.bridge
say('vllm' in sys.modules, bridge())
skyrl.uninstall()
say(bridge())
skyrl.install()
say(bridge())
skyrl.uninstall()
import kimi_bridge.megatron
kimi_bridge.megatron.register()
skyrl.install()
skyrl.uninstall()
say(bridge())
""")
    ours, theirs = "kimi_bridge.KimiK25TextBridge", "megatron.KimiK25VLBridge"
    # At last: what was registered before install() stays registered after uninstall().
    assert lines == [f"False {ours}", theirs, ours, ours]


@needs(megatron=True)
def test_this_library_first() -> None:
    lines = run("""
skyrl.install()
import kimi_bridge.megatron
say(bridge())
from megatron.bridge import AutoBridge
say(hasattr(AutoBridge.from_hf_pretrained.__func__, '_kimi_bridge'))
skyrl.uninstall()
""")
    assert lines == ["kimi_bridge.KimiK25TextBridge", "True"]


@needs(skyrl=True)
def test_skyrl_first() -> None:
    lines = run("""
import skyrl.backends.skyrl_train.workers.megatron.megatron_worker as worker
from kimi_bridge.integrations import skyrl
say(bridge())
skyrl.install()
say(bridge(), hasattr(worker.MegatronWorker.init_configs, '__wrapped__'))
skyrl.uninstall()
say(bridge(), hasattr(worker.MegatronWorker.init_configs, '__wrapped__'))
""")
    assert lines == [
        "megatron.KimiK25VLBridge",
        "kimi_bridge.KimiK25TextBridge True",
        "megatron.KimiK25VLBridge False",
    ]


@needs(skyrl=True)
@pytest.mark.skipif(not SKYRL_040.is_dir(), reason="scripts/setup_skyrl.sh puts SkyRL 0.4.0 there")
def test_skyrl_0_4_0_registers_its_own_and_is_behind(tmp_path: Path) -> None:
    """Its bridge is real here; two names of the newer Megatron-Bridge that its file asks for are not."""
    script = f"""
import ast, types, textwrap
import megatron.bridge.models.conversion.utils as utils
utils.moe_experts_stored_packed = lambda *args, **kwargs: False
glm = 'skyrl.backends.skyrl_train.patches.megatron.glm5_next.bridge'
sys.modules[glm] = types.ModuleType(glm)
skyrl.install()
import skyrl as theirs
from skyrl.backends.skyrl_train.workers.megatron import model_bridges
say(theirs.__file__.startswith({str(SKYRL_040)!r}), bridge())
skyrl = sys.modules['kimi_bridge.integrations.skyrl']
skyrl.uninstall()
say(bridge())
skyrl.install()
say(bridge())

# SkyRL 0.4.0's own check of the bridge's class, out of its init_configs.
source = open({str(SKYRL_040)!r} + '/skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py').read()
checks = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)
          and '!= "KimiK25TextBridge"' in (ast.get_source_segment(source, node.test) or '')]
outer = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)
         and 'kimi_k25' in ast.get_source_segment(source, node.test)
         and any('KimiK25TextBridge' in ast.dump(each) for each in node.body)]
say(len(checks))
from megatron.bridge import AutoBridge
from kimi_bridge.checkpoint import synthesize_checkpoint
import logging
folder = synthesize_checkpoint({str(tmp_path / "tiny")!r})
check = compile(ast.Module([outer[-1]], []), 'init_configs', 'exec')
def run_check():
    found = AutoBridge.from_hf_pretrained(str(folder))
    exec(check, dict(language_model_only=True, bridge=found, hf_config_original=found.hf_pretrained.config,
                     logger=logging.getLogger()))
run_check()
say('passed')
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge
from megatron.bridge.models.kimi_vl.modeling_kimi_k25_vl import KimiK25VLModel
MegatronModelBridge.register_bridge(
    source='KimiK25ForConditionalGeneration', target=KimiK25VLModel)(KimiK25VLBridge)
try:
    run_check()
except RuntimeError as error:
    say(str(error)[:60])
"""
    path = os.pathsep.join([str(SKYRL_040), *filter(None, [os.environ.get("PYTHONPATH")])])
    lines = run(script, PYTHONPATH=path)
    assert lines == [
        "True kimi_bridge.KimiK25TextBridge",
        "skyrl.KimiK25TextBridge",
        "kimi_bridge.KimiK25TextBridge",
        "1",
        "passed",
        "Kimi K2.5-family checkpoint dispatched to KimiK25VLBridge, not"[:60],
    ]
