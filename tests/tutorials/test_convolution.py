"""Attention as convolution: quadratic relative positions, in one and two dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from built import Built, built, close
from convolution import ImageAttention, SequenceAttention, from_convolution
from torch import Tensor, nn

pytestmark = pytest.mark.xdist_group("test_convolution")  # what it makes is shared

C, OUT = 3, 4
IMAGES = {
    "one pixel": (1, 1, 1),
    "a row": (1, 1, 7),
    "a column of a batch": (3, 9, 1),
    "two by two": (2, 2, 2),
    "a square": (2, 5, 5),
    "larger than what was traced": (1, 17, 12),
    "a large batch of small images": (16, 3, 4),
}
IMAGE_AXES = {"images": {0: "batch", 2: "height", 3: "width"}}

CONVOLUTIONS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "5x5": {"kernel_size": 5, "padding": 2},
    "1x3": {"kernel_size": (1, 3), "padding": (0, 1)},
    "1x1, one head": {"kernel_size": 1, "padding": 0},
    "3x3 that skips every other pixel": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "3x3 without a bias": {"kernel_size": 3, "padding": 1, "bias": False},
}


def convolution_2d(dtype: torch.dtype = torch.float32, **options) -> nn.Conv2d:
    torch.manual_seed(0)
    options = {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"} | options
    return nn.Conv2d(C, OUT, **options).to(dtype)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Conv2d, Built]:
    """Return a 3x3 convolution, and the graph of the attention that equals it."""
    convolution = convolution_2d()
    folder = tmp_path_factory.mktemp("kernel")
    attention = from_convolution(convolution)
    return convolution, built(
        attention, folder, {"images": drawn(2, C, 4, 5)}, IMAGE_AXES, ["output"]
    )


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@torch.no_grad()
def test_heads_at_the_offsets_of_a_kernel_are_the_convolution_up_to_the_border(options: dict):
    convolution = convolution_2d(torch.float64, **options)
    images = drawn(2, C, 6, 5, dtype=torch.float64)
    actual = from_convolution(convolution)(images)
    torch.testing.assert_close(actual, convolution(images), rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_with_zeros_around_the_image_the_inside_is_the_same_and_the_border_is_not():
    convolution = convolution_2d(torch.float64, padding_mode="zeros")
    images = drawn(2, C, 6, 5, dtype=torch.float64)
    error = (from_convolution(convolution)(images) - convolution(images)).abs()
    assert error[..., 1:-1, 1:-1].max() < 1e-13
    border = torch.ones(6, 5, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert error[..., border].amax(dim=(0, 1)).min() > 0.1


@torch.no_grad()
def test_the_error_falls_exponentially_as_the_heads_look_more_sharply():
    convolution = convolution_2d(torch.float64)
    images = drawn(2, C, 6, 5, dtype=torch.float64)

    def error_at(alpha: float) -> float:
        attention = from_convolution(convolution, alpha=alpha)
        return float((attention(images) - convolution(images)).abs().max())

    error = {alpha: error_at(alpha) for alpha in (2.0, 4.0, 8.0)}
    assert error[2.0] > 0.1
    for sharp in (4.0, 8.0):
        fell = torch.tensor(error[sharp / 2] / error[sharp]).log()
        assert fell == pytest.approx(sharp / 2, rel=0.15)


@pytest.mark.extended
@pytest.mark.parametrize("size", IMAGES.values(), ids=IMAGES)
@torch.no_grad()
def test_the_graph_is_the_convolution_for_images_of_any_size(size, kernel):
    convolution, graph = kernel
    batch, height, width = size
    images = drawn(batch, C, height, width)
    (output,) = graph.run(images=images)
    close(output, convolution(images))
    zeros = F.conv2d(images, convolution.weight, convolution.bias, padding=1)
    close(output[..., 1:-1, 1:-1], zeros[..., 1:-1, 1:-1])


@pytest.mark.extended
def test_the_graph_names_its_dynamic_axes(kernel):
    _, graph = kernel
    for value, channels in ((*graph.graph.input, C), (*graph.graph.output, OUT)):
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        assert dims == ["batch", channels, "height", "width"]


@torch.no_grad()
def test_in_one_dimension_it_is_conv1d():
    convolution = nn.Conv1d(C, OUT, 5, padding=2, padding_mode="replicate").double()
    attention = from_convolution(convolution)
    assert isinstance(attention, SequenceAttention)
    for length in (1, 2, 9):
        tokens = drawn(2, length, C, dtype=torch.float64)
        wanted = convolution(tokens.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(attention(tokens), wanted, rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_soft_heads_weigh_every_pixel_by_its_distance_from_the_centre():
    torch.manual_seed(2)
    attention = ImageAttention(C, OUT, 2).double()
    nn.init.uniform_(attention.alpha, 0.1, 1.0)
    images = drawn(2, C, 3, 4, dtype=torch.float64)
    places = [(row, column) for row in range(3) for column in range(4)]
    output = attention(images)
    for row, column in places:
        seen = []
        for centre, alpha in zip(attention.centre, attention.alpha, strict=True):
            shares = [
                torch.exp(-alpha * ((r - row - centre[0]) ** 2 + (c - column - centre[1]) ** 2))
                for r, c in places
            ]
            pixels = zip(shares, places, strict=True)
            seen.append(sum(share * images[..., r, c] for share, (r, c) in pixels) / sum(shares))
        wanted = attention.mix(torch.cat(seen, dim=-1))
        torch.testing.assert_close(output[..., row, column], wanted, rtol=1e-12, atol=1e-12)


def test_a_head_learns_where_to_look_and_what_it_learned_passes(tmp_path: Path):
    """Check that a target two places before moves the centre of the attention there."""
    torch.manual_seed(4)
    module = SequenceAttention(C, C, 1)
    nn.init.constant_(module.centre, -0.8)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(5)
    for _ in range(300):
        tokens = torch.randn(8, 12, C, generator=random)
        loss = (module(tokens)[:, 2:] - tokens[:, :-2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(module.centre.detach()) == pytest.approx(-2, abs=0.1)
    assert module.alpha > 2
    axes = {"tokens": {0: "batch", 1: "query_len"}}
    graph = built(module, tmp_path, {"tokens": drawn(2, 5, C)}, axes, ["output"])
    tokens = drawn(3, 20, C)
    (output,) = graph.run(tokens=tokens)
    with torch.no_grad():
        close(output, module(tokens))
    assert (output[:, 2:] - tokens[:, :-2]).square().mean() < 0.02
