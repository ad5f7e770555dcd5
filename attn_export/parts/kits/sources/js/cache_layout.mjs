/** Order of the axes of the cache, which may differ between the graph and the signature. */

import { permuted } from './slices.mjs';

/**
 * @typedef {import('./bundle.mjs').Bundle} Bundle
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 */

/**
 * Transpose tensors from the signature's order of axes to the graph's.
 * @param {Bundle} bundle
 * @param {Tensors} tensors
 * @returns {Tensors}
 */
export const toGraph = (bundle, tensors) => ordered(tensors, bundle.graph.layouts);

/**
 * Transpose tensors from the graph's order of axes to the signature's.
 * @param {Bundle} bundle
 * @param {Tensors} tensors
 * @returns {Tensors}
 */
export function fromGraph(bundle, tensors) {
  const inverse = Object.entries(bundle.graph.layouts).map(([name, order]) => [
    name,
    order.map((_, axis) => order.indexOf(axis)),
  ]);
  return ordered(tensors, Object.fromEntries(inverse));
}

/**
 * The axes of an input in the order of the graph.
 * @param {Bundle} bundle
 * @param {string} name
 * @returns {(string | number)[]}
 */
export function graphAxes(bundle, name) {
  const { shape } = bundle.inputs[name];
  return bundle.graph.layouts[name]?.map((axis) => shape[axis]) ?? shape;
}

const ordered = (tensors, layouts) =>
  Object.fromEntries(
    Object.entries(tensors).map(([name, tensor]) => [
      name,
      layouts[name] ? permuted(tensor, layouts[name]) : tensor,
    ]),
  );
