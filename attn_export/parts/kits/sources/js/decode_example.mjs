/**
 * Example of decoding with the KV cache: a prompt, then one token after the other.
 *
 * A real model would embed the token that it chose from the last output. Here the hidden states of
 * each token are random numbers.
 */

import { Decoder, emptyPasts } from './decoding.mjs';
import { arrayOf, isFloating, sizeOf } from './dtypes.mjs';

/** @typedef {import('./bundle.mjs').Bundle} Bundle */

export const PROMPT = 8;

/**
 * Decode some tokens.
 * @param {import('./model.mjs').Model} model
 * @param {Bundle} bundle  With a cache.
 * @param {number} tokens  After the prompt.
 * @returns {Promise<{held: number, each: number}>}  Tokens in the cache at the end, and the
 *   milliseconds of each token.
 */
export async function decodeTokens(model, bundle, tokens) {
  const sizes = { batch: 1, capacity: PROMPT + tokens };
  const decoder = new Decoder(model, bundle, emptyPasts(bundle, sizes));
  const step = (count) => decoder.step(newTokens(bundle, { ...sizes, held: decoder.held, count }));

  await step(PROMPT);
  const started = performance.now();
  for (let token = 0; token < tokens; token++) await step(1);
  return { held: decoder.held, each: (performance.now() - started) / tokens };
}

/** The inputs of new tokens, which follow those in the cache. */
function newTokens(bundle, { batch, capacity, held, count }) {
  const sizes = { batch, capacity, query_len: count, total_len: held + count, logit_count: 1 };
  const feeds = {};
  for (const [name, { dtype, shape }] of Object.entries(bundle.inputs)) {
    if (bundle.pasts.includes(name) || name === 'past_length') continue; // the decoder adds these
    const dims = shape.map((axis) => sizes[axis] ?? axis);
    feeds[name] = { type: dtype, dims, data: values(name, dtype, dims, held) };
  }
  return feeds;
}

function values(name, dtype, dims, held) {
  const data = new (arrayOf(dtype))(sizeOf(dims));
  if (dtype === 'bool') return data.fill(1); // every query may attend to every key
  if (name === 'position_ids') return data.map((_, i) => BigInt(held + (i % dims.at(-1))));
  if (name === 'attn_mask' || !isFloating(dtype)) return data; // a mask without effect, or integers
  if (dtype === 'float16') return data.map(() => Math.random() * 0x3c00); // bits of 0 … 1
  return data.map(() => Math.random() * 2 - 1);
}
