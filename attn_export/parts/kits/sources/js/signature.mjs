/**
 * Checks that tensors match the signature of a bundle.
 *
 * @typedef {import('./bundle.mjs').Value} Value
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 */

import { codeOf } from './dtypes.mjs';

const MOST_AXES = 8;

/**
 * Check the entries of a manifest for inputs or outputs.
 * @param {Record<string, Value>} values
 * @throws {Error} If a type or shape is invalid.
 */
export function checkValues(values) {
  const isAxis = (axis) =>
    (typeof axis === 'string' && axis !== '') || (Number.isSafeInteger(axis) && axis >= 0);
  for (const [name, { dtype, shape }] of Object.entries(values)) {
    codeOf(dtype);
    if (!Array.isArray(shape) || shape.length > MOST_AXES || !shape.every(isAxis)) {
      throw new Error(`manifest.json has an invalid shape for ${name}`);
    }
  }
}

/**
 * The sizes of named axes. Each name has one size in all tensors of a case.
 * @param {{path: string, value: Value, tensor: import('./dtypes.mjs').Tensor}[]} tensors
 * @returns {Record<string, number>}
 * @throws {Error} If a type, rank or size differs.
 */
export function sizesOf(tensors) {
  const sizes = new Map();
  for (const { path, value, tensor } of tensors) {
    const { type, dims } = tensor;
    if (type !== value.dtype) throw new Error(`${path} has the type ${type}, expected ${value.dtype}`);
    if (dims.length !== value.shape.length) {
      throw new Error(`${path} has the rank ${dims.length}, expected ${value.shape.length}`);
    }
    const wanted = value.shape.map((axis, at) => {
      if (typeof axis === 'number') return axis;
      if (!sizes.has(axis)) sizes.set(axis, dims[at]);
      return sizes.get(axis);
    });
    if (`${dims}` !== `${wanted}`) {
      throw new Error(`${path} has the shape [${dims}], expected [${wanted}]`);
    }
  }
  return Object.fromEntries(sizes);
}

/**
 * Check that the new tokens fit into a cache, into which they are written from `past_length` on.
 * @param {Tensors} inputs
 * @param {Record<string, number>} sizes
 * @throws {Error} If they do not fit.
 */
export function checkLengths(inputs, { capacity, query_len: tokens }) {
  for (const length of inputs.past_length?.data ?? []) {
    if (length < 0 || Number(length) > capacity - tokens) {
      throw new Error(`past_length holds ${length}, expected 0 to ${capacity - tokens}`);
    }
  }
}
