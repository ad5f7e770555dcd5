/** Replay of a case token by token, which must give the same as the whole case at once. */

import { fromGraph, toGraph } from './cache_layout.mjs';
import { zeros } from './dtypes.mjs';
import { Decoder } from './decoding.mjs';
import { cut, place } from './slices.mjs';

/**
 * @typedef {import('./bundle.mjs').Bundle} Bundle
 * @typedef {import('./dtypes.mjs').Tensor} Tensor
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 */

/**
 * Decode a case that starts with an empty cache.
 * @param {import('./model.mjs').Model} model
 * @param {Bundle} bundle
 * @param {Record<string, number>} sizes  The sizes of the named axes of the case.
 * @param {Tensors} inputs  The inputs of the whole case.
 * @returns {Promise<Tensors>}  The outputs of all steps, concatenated to those of the whole case.
 * @throws {Error} If the case cannot be run by token, or an output has an unexpected shape.
 */
export async function replay(model, bundle, sizes, inputs) {
  checkTokens(sizes);
  const decoder = new Decoder(model, bundle, toGraph(bundle, startingPasts(bundle, inputs)));
  const whole = Object.fromEntries(
    Object.entries(bundle.outputs).map(([name, { dtype, shape }]) => [
      name,
      zeros(dtype, shape.map((axis) => sizes[axis] ?? axis)),
    ]),
  );
  let last = {};
  for (let token = 0; token < sizes.query_len; token++) {
    last = await decoder.step(inputsOf(bundle, inputs, token));
    for (const [name, { shape }] of Object.entries(bundle.outputs)) {
      if (shape.includes('query_len')) put(whole[name], last[name], name, shape, token, sizes);
    }
  }
  // The cache after the last token is the cache of the whole case.
  for (const [name, { shape }] of Object.entries(bundle.outputs)) {
    if (!shape.includes('query_len')) whole[name] = last[name];
  }
  return { ...whole, ...fromGraph(bundle, caches(whole, bundle)) };
}

const caches = (whole, { pasts, presents }) =>
  Object.fromEntries(pasts.map((past) => [presents[past], whole[presents[past]]]));

/** Check that the case has at least one token, and exactly one key for each token. */
function checkTokens({ query_len: tokens, total_len: keys, capacity }) {
  if (!(tokens > 0)) throw new Error('the case has no tokens to feed one by one');
  if ((keys ?? tokens) !== tokens || (capacity ?? tokens) < tokens) {
    throw new Error(`it has ${keys ?? capacity} keys, expected those of ${tokens} tokens`);
  }
}

/** The caches of the first step: those of the case if they are in place, otherwise empty ones. */
function startingPasts(bundle, inputs) {
  return Object.fromEntries(
    bundle.pasts.map((past) => {
      const { shape } = bundle.inputs[past];
      const cache = inputs[past];
      if (bundle.cache === 'append') return [past, cut(cache, shape.indexOf('past_len'), 0, 0)];
      return [past, { ...cache, data: cache.data.slice() }];
    }),
  );
}

/** The inputs of one token: its row, and on axes of keys the keys up to it. */
function inputsOf(bundle, inputs, token) {
  const feeds = {};
  for (const [name, { shape }] of Object.entries(bundle.inputs)) {
    if (bundle.pasts.includes(name) || name === 'past_length') continue;
    let part = inputs[name];
    for (const [at, axis] of shape.entries()) {
      if (axis === 'query_len') part = cut(part, at, token, 1);
      else if (axis === 'total_len') part = cut(part, at, 0, token + 1);
    }
    feeds[name] = part;
  }
  return feeds;
}

/** Copy the row of a token into the whole output, with 0 for later keys. */
function put(target, piece, name, shape, token, sizes) {
  const grown = { query_len: 1, total_len: token + 1 };
  // Learned keys are last, behind keys of which a step has fewer than the whole case.
  const learned = sizes.weights_len - (sizes.total_len ?? sizes.capacity);
  if (sizes.total_len !== undefined) grown.weights_len = token + 1 + learned;
  const wanted = shape.map((axis) => grown[axis] ?? sizes[axis] ?? axis);
  if (`${piece?.dims}` !== `${wanted}`) {
    throw new Error(`${name} is [${piece?.dims}] at token ${token}, expected [${wanted}]`);
  }
  const offsets = shape.map((axis) => (axis === 'query_len' ? token : 0));
  const at = shape.indexOf('weights_len');
  if (at < 0 || grown.weights_len === undefined) {
    place(target, piece, offsets);
    return;
  }
  place(target, cut(piece, at, 0, token + 1), offsets);
  offsets[at] = sizes.total_len;
  place(target, cut(piece, at, token + 1, learned), offsets);
}
