"""The writer on a GPU: what the CPU writes, flash attention that is right, and the speed that is promised."""

from __future__ import annotations

import time

import pytest
import torch

from longspec.config import ModelConfig
from longspec.data.writer import BatchAttention, Job, Writer
from longspec.models.target import Transformer
from tests.decoding.scripted import tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")


def jobs(vocab_size: int) -> list[Job]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (50,), generator=generator).tolist()
    return [
        Job(
            index,
            torch.randint(vocab_size, (length,), generator=generator).tolist(),
            5 + 3 * (index % 20),
            (0.0, 0.4, 1.0)[index % 3],
            index - 7,
        )
        for index, length in enumerate(lengths)
    ]


def write(target: Transformer, batch: int) -> dict[int, list[int]]:
    return {done.job.key: done.tokens for done in Writer(target, batch, 128, [3]).write(jobs(40))}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_gpu_writes_what_the_cpu_writes(family: str) -> None:
    flags = {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3", "family": family}
    target = tiny_target(3, vocab_size=40, hidden_size=64, head_dim=32, **flags)
    expected = write(target, 4)
    target.to(GPU)
    for batch in (1, 7, 64):
        assert write(target, batch) == expected
    assert any(tokens[-1] == 3 for tokens in expected.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "G", "D"), [(3, 3, 64), (2, 1, 128), (1, 8, 40)])
def test_each_row_sees_its_own_keys(K: int, G: int, D: int, dtype: torch.dtype) -> None:
    B, S = 5, 192
    torch.manual_seed(0)
    q = torch.randn(B, 1, K * G, D, device=GPU).to(dtype)
    k, v = (torch.randn(B, S, K, D, device=GPU).to(dtype).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([0, 1, 63, 128, 191], device=GPU)
    attention = BatchAttention()
    out, _ = attention.attend(q, k, v, attention.plan(lengths, 1))
    for row, length in enumerate(lengths.tolist()):
        keys, values = (part[row, :, : length + 1].double().repeat_interleave(G, 0) for part in (k, v))
        scores = torch.einsum("hd,hsd->hs", q[row, 0].double(), keys) / D**0.5
        exact = torch.einsum("hs,hsd->hd", scores.softmax(-1), values)
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out[row, 0].double(), exact, atol=tolerance, rtol=tolerance)


def smollm2_shape() -> Transformer:
    target = Transformer(ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tied_head=True))
    torch.manual_seed(0)
    for weight in target.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.02)
    return target.to(device=GPU, dtype=torch.bfloat16).requires_grad_(False).eval()


def test_80_000_tokens_per_second_and_the_same_ones_again() -> None:
    writer = Writer(smollm2_shape(), 1024, 640, [])
    list(writer.write([Job(0, [1], 1, 0.0, 0)]))  # captures
    work = [Job(i, [1, i % 1000, 5] * 20, 64 + i * 7919 % 448, i % 3 / 2, i) for i in range(4096)]
    found = []
    for _ in range(2):
        started = time.perf_counter()
        found.append({done.job.key: done.tokens for done in writer.write(work)})
        speed = sum(map(len, found[-1].values())) / (time.perf_counter() - started)
    assert found[0] == found[1]
    assert speed > 80_000, speed
