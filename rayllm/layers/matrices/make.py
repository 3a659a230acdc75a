"""Which format a linear layer's weight has in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayllm.config.quantization import Storage, WeightFormat
from rayllm.layers.layer import BuildContext
from rayllm.layers.matrices.fp8 import Fp8Matrix
from rayllm.layers.matrices.int4 import Int4Matrix
from rayllm.layers.matrices.matrix import Matrix, Piece
from rayllm.layers.matrices.plain import PlainMatrix

# (context, rows, columns, pieces, format) -> a matrix that keeps the format; None where no product has such a shape.
MakeMatrix = Callable[[BuildContext, int, int, Sequence[Piece], WeightFormat], Matrix | None]
KINDS: dict[Storage, MakeMatrix] = {
    "fp8": Fp8Matrix.make,
    "packed": Int4Matrix.make,
    "gptq": Int4Matrix.make,
    "awq": Int4Matrix.make,
}


def make_matrix(context: BuildContext, rows: int, columns: int, pieces: Sequence[Piece]) -> Matrix:
    """[rows, columns] of the rank, which the pieces cover: in the format that all of them have in the checkpoint.

    In the model's dtype where they have none, differ, or no product is there for it.
    """
    found = [context.format_of(piece.module) for piece in pieces]
    matrix, first = None, found[0]
    if first is not None and first.storage in KINDS and all(each == first for each in found):
        matrix = KINDS[first.storage](context, rows, columns, pieces, first)
    return PlainMatrix(context, rows, columns) if matrix is None else matrix
