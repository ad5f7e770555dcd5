/** Slices, copies and transposition of tensors. */

import { arrayOf, sizeOf } from './dtypes.mjs';

/** @typedef {import('./dtypes.mjs').Tensor} Tensor */

/**
 * A slice of a tensor along one axis: elements `start` … `start + count − 1`.
 * @param {Tensor} tensor
 * @param {number} axis
 * @param {number} start
 * @param {number} count
 * @returns {Tensor}
 */
export function cut(tensor, axis, start, count) {
  const { type, dims, data } = tensor;
  const inner = sizeOf(dims.slice(axis + 1));
  const outer = sizeOf(dims.slice(0, axis));
  const out = new (arrayOf(type))(outer * count * inner);
  for (let i = 0; i < outer; i++) {
    const from = (i * dims[axis] + start) * inner;
    out.set(data.subarray(from, from + count * inner), i * count * inner);
  }
  return { type, dims: replaced(dims, axis, count), data: out };
}

/**
 * Copy a tensor into a larger one.
 * @param {Tensor} target
 * @param {Tensor} piece
 * @param {number[]} offsets  The index in `target` of the first element of `piece`.
 */
export function place(target, piece, offsets) {
  if (sizeOf(piece.dims) === 0) return;
  const last = piece.dims.length - 1;
  const copy = (axis, from, to) => {
    if (axis >= last) {
      const width = piece.dims[last] ?? 1;
      target.data.set(piece.data.subarray(from, from + width), to + (offsets[last] ?? 0));
      return;
    }
    const [pieceStep, targetStep] = [piece, target].map((t) => sizeOf(t.dims.slice(axis + 1)));
    for (let i = 0; i < piece.dims[axis]; i++) {
      copy(axis + 1, from + i * pieceStep, to + (i + offsets[axis]) * targetStep);
    }
  };
  copy(0, 0, 0);
}

/**
 * A transposed copy of a tensor.
 * @param {Tensor} tensor
 * @param {number[]} order  Axis i of the result is axis `order[i]` of the tensor.
 * @returns {Tensor}
 */
export function permuted({ type, dims, data }, order) {
  const steps = dims.map((_, axis) => sizeOf(dims.slice(axis + 1)));
  const out = new (arrayOf(type))(data.length);
  let at = 0;
  const copy = (axis, from) => {
    if (axis === order.length) {
      out[at++] = data[from];
      return;
    }
    for (let i = 0; i < dims[order[axis]]; i++) copy(axis + 1, from + i * steps[order[axis]]);
  };
  copy(0, 0);
  return { type, dims: order.map((axis) => dims[axis]), data: out };
}

const replaced = (dims, axis, size) => dims.map((old, i) => (i === axis ? size : old));
