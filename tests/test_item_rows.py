"""Rows that differ between batch items, in the hands of the code of diffusers that applies them."""

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_joyimage import _apply_rotary_emb as apply_joy
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor

from tomesd.regions.item_rows import ItemRows

B, N, H, C = 3, 5, 2, 8


@pytest.fixture
def tables() -> tuple[Tensor, Tensor]:
    """Cosines and sines, `[B, N, C]` each."""
    angles = torch.randn(B, N, C // 2, generator=torch.Generator().manual_seed(0))
    angles = angles.repeat_interleave(2, dim=2)
    return angles.cos(), angles.sin()


def queries() -> Tensor:
    return torch.randn(B, N, H, C, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("unbind", [-1, -2])
def test_cosines_and_sines(tables, heads_first, unbind) -> None:
    """As Flux and most others have them."""
    x = queries().transpose(1, 2) if heads_first else queries()
    options = {"sequence_dim": 2 if heads_first else 1, "use_real_unbind_dim": unbind}
    together = apply_rotary_emb(x, tuple(map(ItemRows, tables)), **options)
    for k in range(B):
        one = apply_rotary_emb(x[[k]], tuple(table[k] for table in tables), **options)
        assert torch.equal(together[[k]], one)


def test_complex_rows(tables) -> None:
    """As Qwen-Image has them."""
    rows = torch.complex(*(table[..., ::2] for table in tables))
    together = apply_rotary_emb_qwen(queries(), ItemRows(rows), use_real=False)
    for k in range(B):
        one = apply_rotary_emb_qwen(queries()[[k]], rows[k], use_real=False)
        assert torch.equal(together[[k]], one)


def test_rows_that_are_viewed(tables) -> None:
    """As JoyImage does."""
    together = apply_joy(queries(), queries(), tuple(map(ItemRows, tables)))[0]
    for k in range(B):
        one = apply_joy(queries()[[k]], queries()[[k]], tuple(table[k] for table in tables))[0]
        assert torch.equal(together[[k]], one)


def test_it_looks_like_the_tensor_it_stands_for(tables) -> None:
    rows = ItemRows(tables[0])
    assert (rows.shape, rows.ndim) == ((N, C), 2)
    assert rows.to(torch.float64).dtype == torch.float64 and rows.device == tables[0].device
    assert torch.equal(rows[1:3].rows, tables[0][:, 1:3])
    assert torch.equal(rows.unsqueeze(0), tables[0])


def test_what_it_cannot_answer_is_an_error(tables) -> None:
    rows = ItemRows(tables[0])
    with pytest.raises(ValueError, match="first size must be 1"):
        rows.view(N, 1, C)
    with pytest.raises(TypeError):
        queries() * rows
