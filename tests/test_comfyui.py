"""The ComfyUI nodes, in the real ComfyUI: a server with its HTTP interface, and its sampler."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy_app
import exact_cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tomesd

ALWAYS = {"when": "always", "ratio": 0.5}  # the models are far too small to gain anything
UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "model_channels": 320,  # ComfyUI tells models apart by this, and takes none that is smaller
    "num_res_blocks": [1],
    "channel_mult": [1],
    "transformer_depth": [1],
    "use_spatial_transformer": True,
    "legacy": False,
    "dtype": torch.float32,
}
SD1 = {"context_dim": 768, "num_heads": 8}
DECODER = {"out_channels": 4, "transformer_depth_middle": -1}
SDXL = {  # with as many blocks as Segmind's Vega has
    "context_dim": 2048,
    "num_head_channels": 64,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 1, 1],
    "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
}
LOADERS = {
    "sd1": ("CheckpointLoaderSimple", {"ckpt_name": "sd1.safetensors"}),
    "sdxl": ("CheckpointLoaderSimple", {"ckpt_name": "sdxl.safetensors"}),
    "flux": ("TinyFlux", {}),
}
TEXT = {"sd1": (768, 768), "sdxl": (2048, 1280), "flux": (16, 12)}


def write_unet(path: Path, prefix: str, kind: Any, **config: Any) -> None:
    with torch.device("meta"):
        model = kind(**UNET | config)
    model = exact_cases.fill(model.to_empty(device="cpu"))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: value.half() for name, value in model.state_dict().items()}, path)


def write_models(folder: Path) -> None:
    unet = comfy_app.module("comfy.ldm.modules.diffusionmodules.openaimodel").UNetModel
    control = comfy_app.module("comfy.cldm.cldm").ControlNet
    prefix, sd1 = "model.diffusion_model.", {**SD1, **DECODER, "transformer_depth_output": [1, 1]}
    write_unet(folder / "checkpoints" / "sd1.safetensors", prefix, unet, **sd1)
    write_unet(folder / "checkpoints" / "sdxl.safetensors", prefix, unet, **DECODER, **SDXL)
    write_unet(
        folder / "controlnet" / "sd1.safetensors",
        "control_model.",
        control,
        **SD1,
        hint_channels=3,
        transformer_depth_middle=-1,
    )
    layer = "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_v"
    (folder / "loras").mkdir()
    up, down = exact_cases.noise("up", (320, 2)), exact_cases.noise("down", (2, 320))
    lora = {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down}
    save_file(lora, folder / "loras" / "sd1.safetensors")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[comfy_app.Server]:
    base = tmp_path_factory.mktemp("comfy")
    write_models(base / "models")
    nodes = base / "custom_nodes"
    nodes.mkdir()
    (nodes / "token_merging").symlink_to(comfy_app.PACK)
    (nodes / "comfy_test_nodes.py").symlink_to(Path(__file__).parent / "comfy_test_nodes.py")
    (base / "input").mkdir()
    tomesd.save(base / "input" / "half.json", {**ALWAYS, "merge_mlp": True})
    server = comfy_app.Server(base)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


class Workflow:
    """A graph of nodes in the form that the server takes; a node's output is (its name, place)."""

    def __init__(self, model: str) -> None:
        self.nodes: dict[str, Any] = {}
        width, pooled = TEXT[model]
        self.model = self.add(LOADERS[model][0], **LOADERS[model][1])
        texts = [
            self.add("RandomConditioning", seed=seed, width=width, pooled=pooled) for seed in (1, 2)
        ]
        self.positive, self.negative = texts
        empty = "EmptySD3LatentImage" if model == "flux" else "EmptyLatentImage"
        self.latent = self.add(empty, width=96, height=96, batch_size=1)

    def add(self, kind: str, **inputs: Any) -> list[Any]:
        name = str(len(self.nodes))
        self.nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    def merge(self, model: Any = None, **options: Any) -> list[Any]:
        return self.add("TomesdTokenMerging", model=model or self.model, **options)

    def more(self, **options: Any) -> list[Any]:
        return self.add("TomesdMoreOptions", **options)

    def sample(self, model: Any = None) -> str:
        """Samples and saves; the name of the node that does so."""
        sampled = self.add(
            "KSampler",
            model=model or self.model,
            seed=0,
            steps=2,
            cfg=2.0,
            sampler_name="euler",
            scheduler="simple",
            positive=self.positive,
            negative=self.negative,
            latent_image=self.latent,
            denoise=1.0,
        )
        return self.add("SaveLatent", samples=sampled, filename_prefix="latent")[0]


def latent(server: comfy_app.Server, result: dict[str, Any], node: str) -> Tensor:
    assert result["status"]["status_str"] == "success", result["status"]
    (saved,) = result["outputs"][node]["latents"]
    return load_file(server.base / "output" / saved["filename"])["latent_tensor"]


def run(server: comfy_app.Server, flow: Workflow, node: str) -> Tensor:
    return latent(server, server.result(server.submit(flow.nodes)), node)


def assert_differs(actual: Tensor, other: Tensor) -> None:
    assert actual.isfinite().all() and (actual - other).std() > 0.01 * other.std()


def test_server_knows_the_nodes(server: comfy_app.Server) -> None:
    known = server.get("/object_info")
    names = {known[name]["display_name"] for name in known if name.startswith("Tomesd")}
    title = "Token Merging"
    more = ("describe", "more options", "settings from file")
    assert names == {title, *(f"{title}: {name}" for name in more)}
    assert known["TomesdTokenMerging"]["python_module"] == "custom_nodes.token_merging"


@pytest.mark.parametrize("model", LOADERS)
def test_merges_and_never_leaks(server: comfy_app.Server, model: str) -> None:
    """Workflows are queued all at once; the server keeps the model from one to the next."""
    flow, submitted = Workflow(model), []
    nodes = [flow.sample(), flow.sample(flow.merge(**ALWAYS))]
    together = server.submit(flow.nodes)
    # Neighbours differ, so that none is taken from the server's cache.
    for ratio in (0.25, None, 0.5, 0.0, None):
        flow = Workflow(model)
        merged = None if ratio is None else flow.merge(**{**ALWAYS, "ratio": ratio})
        node = flow.sample(merged)
        submitted.append((server.submit(flow.nodes), node))
    less, plain, merged, zero, again = (
        latent(server, server.result(prompt), node) for prompt, node in submitted
    )
    assert torch.equal(zero, plain) and torch.equal(again, plain)
    assert_differs(merged, plain)
    assert_differs(less, plain)
    assert_differs(less, merged)
    both = [latent(server, server.result(together), node) for node in nodes]
    assert torch.equal(both[0], plain) and torch.equal(both[1], merged)


def test_stacks_with_lora_and_controlnet(server: comfy_app.Server) -> None:
    def image(*order: str, ratio: float = 0.5) -> Tensor:
        flow = Workflow("sd1")
        if "control" in order:
            control = flow.add("ControlNetLoader", control_net_name="sd1.safetensors")
            hint = flow.add("EmptyImage", width=96, height=96, batch_size=1, color=0x40A0FF)
            texts = {"positive": flow.positive, "negative": flow.negative}
            span = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
            applied = flow.add(
                "ControlNetApplyAdvanced", control_net=control, image=hint, **texts, **span
            )
            flow.positive, flow.negative = applied, [applied[0], 1]
        model = flow.model
        for step in order:
            if step == "merge":
                model = flow.merge(model, **{**ALWAYS, "ratio": ratio})
            elif step == "lora":
                lora = {"lora_name": "sd1.safetensors", "strength_model": 1.0}
                model = flow.add("LoraLoaderModelOnly", model=model, **lora)
        return run(server, flow, flow.sample(model))

    everything = image("lora", "merge", "control")
    assert torch.equal(image("merge", "lora", "control"), everything)
    for less in (("lora", "merge"), ("merge", "control"), ("lora", "control")):
        assert_differs(image(*less), everything)
    assert torch.equal(image("lora", "merge", "control", ratio=0.0), image("lora", "control"))


def test_settings_from_a_file_and_what_they_do(server: comfy_app.Server) -> None:
    flow = Workflow("sd1")
    file = flow.add("TomesdSettingsFromFile", file="half.json")
    merged = flow.merge(settings=file)
    size = {"width": 512, "height": 256, "frames": 1, "batch": 2}
    described = flow.add("TomesdDescribe", model=merged, **size)[0]
    plain = flow.add("TomesdDescribe", model=flow.model, **size)[0]
    node = flow.sample(merged)
    result = server.result(server.submit(flow.nodes))
    by_file = latent(server, result, node)
    (text,) = result["outputs"][described]["text"]
    assert "latent 32x64: attn + mlp merged at ratio 0.5" in text and "1024" in text
    assert "not patched" in result["outputs"][plain]["text"][0]

    flow = Workflow("sd1")
    by_hand = run(
        server, flow, flow.sample(flow.merge(**ALWAYS, settings=flow.more(merge_mlp="yes")))
    )
    assert torch.equal(by_hand, by_file)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": "kv"}, "target='kv': a Flux allows one of"),
        ({"merge_mlp": "yes"}, "merge_mlp=True: means nothing on a Flux"),
        ({"start": 0.9, "end": 0.1}, "start=0.9: must be below end=0.1"),
    ],
)
def test_an_error_names_the_option(
    server: comfy_app.Server, options: dict[str, Any], message: str
) -> None:
    flow, options = Workflow("flux"), dict(options)
    more = {name: options.pop(name) for name in ("merge_mlp",) if name in options}
    flow.sample(flow.merge(**options, settings=flow.more(**more)))
    status = server.result(server.submit(flow.nodes))["status"]
    (error,) = [about for kind, about in status["messages"] if kind == "execution_error"]
    assert message in error["exception_message"]
    assert flow.nodes[error["node_id"]]["class_type"] == "TomesdTokenMerging"


EXAMPLES = sorted((comfy_app.PACK / "example_workflows").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_workflows_fit_the_nodes(server: comfy_app.Server, path: Path) -> None:
    """Of an example as the page saves it, the server misses the model files and nothing else."""
    known, saved = server.get("/object_info"), json.loads(path.read_text())
    links = {link[0]: [str(link[1]), link[2]] for link in saved["links"]}
    prompt = {}
    for node in saved["nodes"]:
        declared = known[node["type"]]["input"]
        every = {**declared.get("required", {}), **declared.get("optional", {})}
        values, inputs = list(node.get("widgets_values", [])), {}
        for name, (kind, *about) in every.items():
            if isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"):
                inputs[name] = values.pop(0)
                if about and about[0].get("control_after_generate"):
                    values.pop(0)
        assert not values, node["type"]
        inputs |= {i["name"]: links[i["link"]] for i in node["inputs"] if i["link"] is not None}
        assert set(inputs) <= set(every)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    errors = server.get("/prompt", {"prompt": prompt})["node_errors"]
    assert set(errors) == {node for node in prompt if "Loader" in prompt[node]["class_type"]}
    for node in errors.values():
        assert {error["type"] for error in node["errors"]} == {"value_not_in_list"}


# In this process


@pytest.fixture(scope="module")
def nodes() -> dict[str, Any]:
    """ComfyUI's nodes, the classic form of ours, and those for the tests."""
    comfy_app.pack()
    with comfy_app.importable():
        tiny = importlib.import_module("comfy_test_nodes").NODE_CLASS_MAPPINGS
    ours = sys.modules["token_merging_nodes.classic"].NODE_CLASS_MAPPINGS
    found = {**comfy_app.module("nodes").NODE_CLASS_MAPPINGS, **tiny, **ours}
    return {name: getattr(kind(), kind.FUNCTION) for name, kind in found.items() if name in NEEDED}


NEEDED = ("TinyFlux", "RandomConditioning", "KSampler", "TomesdTokenMerging", "TomesdMoreOptions")


@pytest.fixture
def flux(nodes: dict[str, Any]) -> Any:
    return nodes["TinyFlux"]()[0]


@torch.inference_mode()
def sample(nodes: dict[str, Any], model: Any, steps: int = 2, seed: int = 0) -> Tensor:
    texts = [nodes["RandomConditioning"](seed, 16, 12)[0] for seed in (1, 2)]
    empty = {"samples": torch.zeros(1, 16, 16, 24)}
    (made,) = nodes["KSampler"](model, seed, steps, 2.0, "euler", "simple", *texts, empty)
    return made["samples"]


def classes(model: Any) -> list[tuple[type, bool]]:
    return [(type(m), "_tomesd" in m.__dict__) for m in model.model.diffusion_model.modules()]


def test_classic_nodes_with_the_sampler(nodes: dict[str, Any], flux: Any) -> None:
    before = classes(flux)
    plain = sample(nodes, flux)
    (merged,) = nodes["TomesdTokenMerging"](flux, **ALWAYS)
    image = sample(nodes, merged)
    assert_differs(image, plain)
    assert torch.equal(sample(nodes, flux), plain) and torch.equal(sample(nodes, merged), image)
    (zero,) = nodes["TomesdTokenMerging"](merged, ratio=0.0)  # replaces the one before
    assert torch.equal(sample(nodes, zero), plain)
    (fast,) = nodes["TomesdTokenMerging"](flux, preset="fast")  # leaves steps out
    assert_differs(sample(nodes, fast, steps=10), sample(nodes, flux, steps=10))
    assert classes(flux) == before


def test_plans_outlive_a_step(nodes: dict[str, Any], flux: Any) -> None:
    options = {**ALWAYS, "end": 1.0}
    each = sample(nodes, nodes["TomesdTokenMerging"](flux, **options)[0], steps=3)
    (shared,) = nodes["TomesdMoreOptions"](share="steps", refresh=9)
    kept = nodes["TomesdTokenMerging"](flux, settings=shared, **options)[0]
    kept = sample(nodes, kept, steps=3)
    assert_differs(kept, each)


def test_an_interrupted_run_leaves_nothing_behind(nodes: dict[str, Any], flux: Any) -> None:
    before, plain = classes(flux), sample(nodes, flux)
    (merged,) = nodes["TomesdTokenMerging"](flux, **ALWAYS)
    seen = []

    def stop(module: nn.Module, args: Any) -> None:
        seen.append(classes(flux) != before)
        raise InterruptedError

    handle = flux.model.diffusion_model.final_layer.register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        sample(nodes, merged)
    handle.remove()
    assert seen == [True] and classes(flux) == before
    assert torch.equal(sample(nodes, flux), plain)


def test_a_cancelled_image_leaves_nothing_to_the_next(nodes: dict[str, Any], flux: Any) -> None:
    (more,) = nodes["TomesdMoreOptions"](reuse=2, reuse_start=0.0)
    (merged,) = nodes["TomesdTokenMerging"](flux, ratio=0.0, settings=more)
    image, utils = sample(nodes, merged, steps=4), comfy_app.module("comfy.utils")
    assert_differs(image, sample(nodes, flux, steps=4))

    def cancel(*_: Any, **__: Any) -> None:
        raise InterruptedError

    utils.set_progress_bar_global_hook(cancel)  # between two steps, as the server does it
    try:
        with pytest.raises(InterruptedError):
            sample(nodes, merged, steps=4, seed=1)
    finally:
        utils.set_progress_bar_global_hook(None)
    assert torch.equal(sample(nodes, merged, steps=4), image)


def test_blocks_that_other_nodes_replace(nodes: dict[str, Any], flux: Any) -> None:
    """One block is left out, as skip-layer guidance does; it would have closed the region."""
    (merged,) = nodes["TomesdTokenMerging"](flux, **ALWAYS)
    image, skipping = sample(nodes, merged), merged.clone()
    seen = []

    def skip(args: Any, extra: Any) -> Any:
        seen.append(args["img"].shape[1])
        return args

    skipping.set_model_patch_replace(skip, "dit", "single_block", 1)
    assert_differs(sample(nodes, skipping), image)
    assert set(seen) == {7 + 8 * 12}  # text, and every token of the image
    assert torch.equal(sample(nodes, merged), image)


def test_both_forms_have_the_same_inputs(nodes: dict[str, Any]) -> None:
    pack = comfy_app.pack()
    assert pack.__all__ == ["comfy_entrypoint"]  # NODE_CLASS_MAPPINGS would win over it
    schema, classic = (sys.modules[f"token_merging_nodes.{name}"] for name in ("schema", "classic"))
    assert len(schema.NODES) == 4
    for name, new in schema.NODES.items():
        old = classic.NODE_CLASS_MAPPINGS[name]
        inputs = [
            {
                place: {
                    key: (kind[0] if isinstance(kind[0], str) else "COMBO")
                    for key, kind in v.items()
                }
                for place, v in form.INPUT_TYPES().items()
                if v and place != "hidden"
            }
            for form in (new, old)
        ]
        assert inputs[0] == inputs[1]
        assert list(inputs[0].get("optional", {})) == list(inputs[1].get("optional", {}))
        assert list(new.RETURN_TYPES) == list(old.RETURN_TYPES)
        assert new.GET_SCHEMA().node_id == name
        assert new.GET_SCHEMA().display_name == classic.NODE_DISPLAY_NAME_MAPPINGS[name]


def test_options_from_inputs(nodes: dict[str, Any]) -> None:
    module = sys.modules["token_merging_nodes.options"]
    every = {**module.INPUTS, **module.MORE_INPUTS}
    defaults = {name: every[name][1]["default"] for name in every if name != "preset"}
    assert module.options(**defaults) == {}
    given = {**defaults, "ratio": 0.0, "use_rand": "no", "depth_from": 0.5}
    mask = torch.ones(1, 4, 4)
    assert module.options(mask=mask, settings={"end": 0.6, "ratio": 0.3}, **given) == {
        "end": 0.6,
        "ratio": 0.0,  # what is set wins over settings
        "use_rand": False,
        "depth": (0.5, 1.0),
        "protect": mask,
    }
    # An end of the depth that is not set stays as it was.
    for before, ends, depth in (
        ({"depth": (0.1, 0.6)}, {"depth_from": 0.2}, (0.2, 0.6)),
        (module.options(depth_from=0.2), {"depth_to": 0.8}, (0.2, 0.8)),
    ):
        assert module.options(settings=before, **ends) == {"depth": depth}
    fields = {field.name for field in dataclasses.fields(tomesd.Settings)}
    missing = {"seed", "level_ratios", "kind_ratios"}  # in files only
    missing |= {"coarse"}  # of transformers of diffusers
    assert set(every) == fields - missing - {"depth"} | {"preset", "depth_from", "depth_to"}
    for kind, _ in every.values():
        assert not isinstance(kind, list) or len(set(kind)) == len(kind)


def test_the_registry_reads_about_the_pack(nodes: dict[str, Any]) -> None:
    about = comfy_app.module("comfy_config.config_parser").extract_node_configuration(
        comfy_app.PACK
    )
    assert about.tool_comfy.display_name == "Token Merging"
    assert about.project.dependencies == (comfy_app.PACK / "requirements.txt").read_text().split()
