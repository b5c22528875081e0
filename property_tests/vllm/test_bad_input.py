"""What cannot be driven is refused in a sentence that says what to do."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from harness import verbs
from harness.backends import BackendError, make_backend
from harness.backends.vllm.install import profile_of
from harness.scenario import EngineShape

SCENARIO = """
schema: 1
name: beyond vLLM
engine: {{block_size: 4, {shape}}}
timeline:
  - submit: {{id: r1, prompt: {{tokens: 4}}, max_tokens: 2}}
  - {call}: {{}}
"""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.parametrize("name", ["vllm", "vllm-scheduler"])
def test_without_vllm_the_engine_cannot_be_had(name):
    with pytest.raises(BackendError, match="needs vLLM in this environment: `nox -s vllm` installs"):
        make_backend(name)


@pytest.mark.parametrize(("version", "name"), [("0.27.1", "vllm-0.27"), ("0.32.0", "vllm-0.32"), ("0.32.1.dev3+cpu", "vllm-0.32")])
def test_the_profile_follows_the_version(version, name):
    profile, note = profile_of(version)
    assert (profile.name, note) == (name, None)


def test_a_newer_version_is_used_with_the_newest_profile_and_a_note():
    profile, note = profile_of("0.41.0")
    assert profile.name == "vllm-0.33"
    assert note == "vLLM 0.41.0 is newer than any profile: vllm-0.33 is used, a mismatch may be a change of vLLM"


@pytest.mark.parametrize("version", ["0.19.1", "dev"])
def test_an_older_version_is_refused(version):
    with pytest.raises(BackendError, match=f"vLLM {version} is not supported: expected 0.26 or newer"):
        profile_of(version)


def test_a_checkpoint_that_vllm_cannot_load_is_refused(tmp_path, needs_vllm):
    from harness.checkpoints import ensure

    folder = tmp_path / "strange"
    folder.mkdir()
    for file in ensure("tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "StrangeForCausalLM").replace('"qwen3"', '"strange"'))
    with pytest.raises(BackendError, match=r"vLLM does not start with checkpoint .*strange"):
        make_backend("vllm").start(EngineShape(checkpoint=str(folder)))


def test_a_device_that_this_vllm_was_not_built_for_is_refused(needs_vllm):
    with pytest.raises(BackendError, match=r"asks for device cuda, this vLLM runs on cpu: use --set engine\.device=cpu"):
        make_backend("vllm").start(EngineShape(device="cuda"))


def test_what_vllm_in_this_process_cannot_is_unknown_and_no_verdict(tmp_path, capsys, needs_vllm):
    host_tier, sleep = tmp_path / "host_tier.yaml", tmp_path / "sleep.yaml"
    host_tier.write_text(SCENARIO.format(shape="host_blocks: 4", call="is_paused"))
    sleep.write_text(SCENARIO.format(shape="num_blocks: 16", call="sleep"))
    code = verbs.run([host_tier, sleep], verbs.Asked((), tmp_path / "runs", 0, False, 1.0), engine="vllm-scheduler")
    assert code == 2
    told = capsys.readouterr().out
    assert "has no host tier, the scenario asks for 4 host_blocks: use sim or torch" in told
    assert "vllm-scheduler cannot sleep: memory that vLLM can give back" in told
