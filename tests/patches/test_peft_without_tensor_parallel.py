"""A LoRA adapter loads in several processes without tensor parallelism as it does in one."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.engine.gate import holds
from tests.support import save_random

ERROR = (
    r"cannot import name 'EmbeddingParallel'|'Gemma4TextExperts' object has no attribute 'weight'"
)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LAYERS = r".*\.(q_proj|o_proj|mlp\.down_proj)"


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    save_random("Gemma4 experts", folder)
    return folder


@pytest.fixture
def group(tmp_path):
    """Begins the process group of this process alone."""
    from torch import distributed

    store = f"file://{tmp_path / 'store'}"
    yield lambda: distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def base(folder):
    from transformers import Gemma4ForCausalLM

    return Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapter(experts_dir, folder, parameters):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=LAYERS, target_parameters=parameters, r=4)
    model = get_peft_model(base(experts_dir), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def from_pretrained(model, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


def second(model, adapter):
    loaded = from_pretrained(model, adapter)
    loaded.load_adapter(adapter, "second")
    loaded.set_adapter("second")
    return loaded


def state_dict(model, adapter):
    """What accelerate does where FSDP resumes an adapter."""
    from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    loaded = get_peft_model(model, LoraConfig.from_pretrained(adapter))
    set_peft_model_state_dict(loaded, load_peft_weights(adapter))
    return loaded.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(1, 12)[None]).logits


def check(load, experts_dir, adapter, group):
    expected = logits(from_pretrained(base(experts_dir), adapter))
    assert not torch.equal(expected, logits(base(experts_dir)))
    group()
    found = logits(load(base(experts_dir), adapter))
    assert torch.equal(found, expected), "another adapter than in one process"


@pytest.mark.regression("peft_without_tensor_parallel", ERROR)
@pytest.mark.parametrize("load", [from_pretrained, state_dict])
def test_an_adapter_on_experts_and_layers(load, experts_dir, tmp_path, group):
    check(load, experts_dir, save_adapter(experts_dir, tmp_path / "adapter", EXPERTS), group)


@pytest.mark.parametrize("load", [from_pretrained, state_dict, second])
def test_an_adapter_on_layers_alone(load, experts_dir, tmp_path, group):
    check(load, experts_dir, save_adapter(experts_dir, tmp_path / "adapter", None), group)


@pytest.mark.skipif(not holds("peft>=0.19,<0.20"), reason="PEFT checks first")
def test_a_sharded_model_is_left_to_peft(experts_dir, tmp_path, group):
    """PEFT cannot load an adapter on sharded experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.integrations import tensor_parallel

    if not hasattr(tensor_parallel, "distribute_model"):
        pytest.skip("from transformers 5.15 on, another function shards a model")
    adapter = save_adapter(experts_dir, tmp_path / "adapter", EXPERTS)
    group()
    mesh = init_device_mesh("cpu", (1,))
    model = tensor_parallel.distribute_model(base(experts_dir), "auto", None, mesh, 1)
    with pytest.raises(AttributeError, match=ERROR):
        from_pretrained(model, adapter)
