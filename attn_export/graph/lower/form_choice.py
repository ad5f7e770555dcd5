"""Forms of the dialect ort of which one or the other is faster, depending on the machine."""

from __future__ import annotations

from typing import NamedTuple

from attn_export.dialect_names import ORT_NEEDED


class Form(NamedTuple):
    """A choice between forms of which one or the other is faster, depending on the machine.

    Attributes:
        block: For many queries: the number of queries of a block, which is computed with the keys
            that it sees; 0 for all at once, in ONNX Runtime's kernels.
        products: Whether products are computed where a kernel fits: for many queries with
            `block`, for one query without.
        whole_rows: For one query over a cache of integers: whether the kernel computes all scores
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
        """The least version of ONNX Runtime."""
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
