"""What checkpoints.py measures of transformers, with fla's kernels where there is a GPU. The parts are as in checkpoints_glax.py.

Without a GPU checkpoints.py hides fla, which runs on GPUs alone: transformers then computes by its own formulas in PyTorch.
"""

import gc
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import triton_tuning
from checkpoints_folder import CONFIGS, narrow, weight_files
from checkpoints_job import (
    CLIP,
    GIB,
    LEARNING_RATE,
    PROMPT,
    RANK,
    TARGETS,
    HostMemory,
    Job,
    copy_seconds,
    decoded,
    drawn_tokens,
    prefilled,
    seconds_of,
)
from transformers import AutoConfig, AutoModelForCausalLM

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


class Fallbacks(logging.Handler):
    """Note which functions transformers computes by its own formulas in PyTorch, as its warnings say."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord):
        text = record.getMessage()
        if "falling back" in text or "fast path" in text:
            self.lines.append(text.split(" because ")[0][:120])


FALLBACKS = Fallbacks()


def about() -> dict[str, Any]:
    """Return the version, and which kernels transformers finds."""
    from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

    transformers.utils.logging.get_logger("transformers").addHandler(FALLBACKS)
    found: dict[str, Any] = dict(transformers=transformers.__version__, torch=torch.__version__, device=DEVICE)
    if HAS_GPU:
        triton_tuning.short_tuning()
        try:
            import fla

            found["fla"] = fla.__version__
        except Exception as error:  # transformers takes its own formulas then, whatever the error is
            found["fla"] = f"not imported: {type(error).__name__}: {error}"
    found["fla_is_available"] = bool(is_flash_linear_attention_available())
    found["causal_conv1d_is_available"] = bool(is_causal_conv1d_available())
    return found


def wait():
    if HAS_GPU:
        torch.cuda.synchronize()


def peak() -> dict[str, float]:
    return dict(gib=torch.cuda.max_memory_allocated() / GIB) if HAS_GPU else {}


def opened(job: Job, folder: Path | None = None, dtype: str = ""):
    kind = getattr(torch, dtype or job.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder or job.folder, dtype=kind, device_map=DEVICE)
    model.generation_config.eos_token_id = None
    wait()
    return model.eval()


def load(job: Job) -> Iterator[dict[str, Any]]:
    torch.zeros(8, device=DEVICE)
    held = []
    for case in ("first load", "second load"):
        with HostMemory() as memory:
            seconds = seconds_of(lambda: held.append(opened(job)))
        yield dict(problem=case, seconds=seconds, **memory.figures, **peak())
        if case == "first load":
            yield from logits(job, held[0])
            held.clear()
            gc.collect()

    def put(x: np.ndarray):
        torch.from_numpy(x).to(DEVICE)
        wait()

    reading, sending = copy_seconds(weight_files(job.folder), put)
    yield dict(problem="copy", seconds=reading + sending, read_s=reading, put_s=sending)


@torch.inference_mode()
def logits(job: Job, model=None) -> Iterator[dict[str, Any]]:
    """Write the logits of a few tokens to a file, in float32."""
    model = opened(job) if model is None else model
    tokens = on_device(drawn_tokens(1, job.sizes.compared, model.config.vocab_size))
    began = time.perf_counter()
    np.save(job.arrays, model(input_ids=tokens).logits[0].float().cpu().numpy())
    yield dict(problem="logits", seconds=time.perf_counter() - began)


def on_device(tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(tokens).long().to(DEVICE)


def prefill(job: Job) -> Iterator[dict[str, Any]]:
    model, sizes = opened(job), job.sizes
    tokens = on_device(drawn_tokens(*sizes.prefill, model.config.vocab_size))

    @torch.inference_mode()
    def run():
        model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        wait()

    yield dict(problem="{} x {}".format(*sizes.prefill), **prefilled(run, sizes), **peak())


def decode(job: Job) -> Iterator[dict[str, Any]]:
    model, sizes = opened(job), job.sizes
    for batch in sizes.batches:
        prompts = on_device(drawn_tokens(batch, sizes.prompt, model.config.vocab_size))

        @torch.inference_mode()
        def run(count, prompts=prompts):
            written = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
            assert written.shape[1] == sizes.prompt + count, written.shape
            wait()

        yield dict(problem=f"B = {batch}", **decoded(run, batch, sizes), **peak())


def trained(model, kind: str, *, whole: bool):
    """Return the model with gradients and recomputation. kind: its model_type."""
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    if not whole:
        from peft import LoraConfig, get_peft_model

        options = dict(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=TARGETS[kind])
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        model.enable_input_require_grads()
    return model.train()


def stepper(model):
    """Return step(tokens) -> loss: one step of AdamW under autocast to bfloat16, as transformers' Trainer takes with bf16."""
    params = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.99), fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def tune(job: Job, *, whole: bool) -> Iterator[dict[str, Any]]:
    """Take training steps. Frozen parameters are bfloat16, and those that are trained float32, as in glax."""
    opened_model = opened(job, job.small, "float32") if whole else opened(job)
    vocabulary, sizes = opened_model.config.vocab_size, job.sizes
    step = stepper(trained(opened_model, opened_model.config.model_type, whole=whole))
    rows, length = sizes.tune
    batches = on_device(drawn_tokens((sizes.warm + sizes.steps) * rows, length, vocabulary)).split(rows)
    began = time.perf_counter()
    loss = step(batches[0]).item()
    first_s = time.perf_counter() - began
    for batch in batches[1 : sizes.warm]:
        step(batch)
    wait()
    began = time.perf_counter()
    for batch in batches[sizes.warm :]:
        step(batch)
    wait()
    seconds = (time.perf_counter() - began) / sizes.steps
    line = dict(ms=1e3 * seconds, tokens_per_second=rows * length / seconds, first_s=first_s, loss=loss)
    yield dict(problem=f"{'all' if whole else f'LoRA {RANK}'}, {rows} x {length}", **line, **peak())


def first(job: Job) -> Iterator[dict[str, Any]]:
    """Write one token in this process, which is a fresh one."""
    from tokenizers import Tokenizer

    model = opened(job)
    tokens = on_device(np.array([Tokenizer.from_file(str(job.folder / "tokenizer.json")).encode(PROMPT).ids]))
    with torch.inference_mode():
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1, do_sample=False)
    wait()
    yield dict(problem="filled cache", seconds=time.time() - job.began)


def compile_a_part(job: Job, part: tuple[int, ...]):
    """Compile a part of the candidates of fla's kernels, by `triton_tuning.compile_a_part`. Outputs are undefined."""
    print(about())
    triton_tuning.compile_a_part(*part)
    config = narrow(CONFIGS[job.name])
    options = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(options, dtype=torch.bfloat16).to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    tokens = on_device(drawn_tokens(2, 512, config["vocab_size"]))
    with torch.inference_mode():
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False)
    with torch.autocast(DEVICE, torch.bfloat16):
        model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    wait()
