/** Decoding with a KV cache: cache outputs of one step are inputs of the next one. */

import { arrayOf, zeros } from './dtypes.mjs';
import { graphAxes } from './cache_layout.mjs';

/**
 * @typedef {import('./bundle.mjs').Bundle} Bundle
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 */

/** A sequence of tokens and its cache. */
export class Decoder {
  #model;
  #bundle;
  #pasts;

  /** The number of tokens in the cache. */
  held = 0;

  /**
   * @param {import('./model.mjs').Model} model
   * @param {Bundle} bundle
   * @param {Tensors} pasts  The cache to start with: `emptyPasts` makes one.
   */
  constructor(model, bundle, pasts) {
    this.#model = model;
    this.#bundle = bundle;
    this.#pasts = pasts;
  }

  /**
   * Run the next tokens: a prompt of several, or a single one.
   * @param {Tensors} inputs  The inputs of the new tokens, without the cache.
   * @returns {Promise<Tensors>}
   */
  async step(inputs) {
    const { inputs: signature, pasts, presents, cache, graph } = this.#bundle;
    const feeds = { ...inputs, ...this.#pasts };
    if (cache === 'in-place') {
      const batch = sizeIn(inputs, signature, 'batch');
      const { dtype } = signature.past_length;
      const lengths = arrayOf(dtype).from({ length: batch }, () =>
        dtype.endsWith('64') ? BigInt(this.held) : this.held,
      );
      feeds.past_length = { type: dtype, dims: [batch], data: lengths };
    }
    // A cache in place is written into the memory of its input, if the engine supports it.
    const outputs = await this.#model.run(feeds, cache === 'in-place' ? graph.bound : {});
    this.#pasts = Object.fromEntries(pasts.map((past) => [past, outputs[presents[past]]]));
    this.held += sizeIn(inputs, signature, 'query_len');
    return outputs;
  }
}

/**
 * An empty cache, with its axes in the order of the graph.
 * @param {Bundle} bundle
 * @param {{batch: number, capacity?: number}} sizes  `capacity`: that of a cache in place.
 * @returns {Tensors}
 */
export function emptyPasts(bundle, { batch, capacity = 0 }) {
  const sizes = { batch, capacity, past_len: 0 };
  return Object.fromEntries(
    bundle.pasts.map((past) => {
      const { dtype } = bundle.inputs[past];
      return [past, zeros(dtype, graphAxes(bundle, past).map((axis) => sizes[axis] ?? axis))];
    }),
  );
}

function sizeIn(inputs, signature, axis) {
  for (const [name, tensor] of Object.entries(inputs)) {
    const at = signature[name].shape.indexOf(axis);
    if (at >= 0) return tensor.dims[at];
  }
  throw new Error(`no input has the axis ${axis}`);
}
