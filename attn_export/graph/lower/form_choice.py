"""Forms of attention in the dialect `ort`, of which the fastest depends on the machine."""

from __future__ import annotations

from typing import NamedTuple

from attn_export.dialect_names import ORT_NEEDED


class Form(NamedTuple):
    """Choice of the form of attention nodes.

    Attributes:
        block: The number of queries in a block, for graphs of many queries; 0 to compute all
            queries at once in ONNX Runtime's kernels.
        products: Whether to compute products although a kernel fits. With `block` it concerns
            graphs of many queries, without it the graph of one query.
        whole_rows: Whether the kernel for one query over a cache of integers computes all scores
            of a head before it reads values, instead of tile by tile.
    """

    block: int = 0
    products: bool = False
    whole_rows: bool = False

    def __str__(self) -> str:
        if self.whole_rows:
            return "whole rows of scores"
        if not self.block:
            return "products" if self.products else "kernels"
        return f"{'' if self.products else 'kernels in '}blocks of {self.block} queries"

    @property
    def needs(self) -> str:
        """The least version of ONNX Runtime that runs the form."""
        measured = self.whole_rows or (self.block and not self.products)
        return "1.31" if measured else ORT_NEEDED


KERNELS, PRODUCTS = Form(), Form(products=True)
FORMS = (
    KERNELS,
    *(Form(block, products=True) for block in (64, 128, 256, 512)),
    *(Form(block) for block in (64, 128, 256)),
    PRODUCTS,
    Form(whole_rows=True),
)
