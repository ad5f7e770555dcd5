/** Tokens of a whole model, one after the other. */

import { BundleError } from './bundle.mjs';
import { Decoder, emptyPasts } from './decoding.mjs';
import { widen } from './dtypes.mjs';

/**
 * Continue a prompt by the tokens with the largest logits, until one ends the text.
 * @param {import('./model.mjs').Model} model
 * @param {import('./bundle.mjs').Bundle} bundle  That of the kit.
 * @param {number[]} prompt  Token ids.
 * @param {number} count  The most tokens.
 * @returns {AsyncGenerator<number>}
 * @throws {BundleError} If the bundle takes no ids or not so many, or one is not in the vocabulary.
 */
export async function* generate(model, bundle, prompt, count) {
  checkPrompt(bundle, prompt, count);
  const { ids } = bundle;
  // The last token is not run.
  const capacity = prompt.length + count - 1;
  const decoder = new Decoder(model, bundle, emptyPasts(bundle, { batch: 1, capacity }));
  let tokens = prompt;
  for (let made = 0; made < count; made++) {
    const inputs = { input_ids: int64([1, tokens.length], tokens) };
    if ('logit_index' in bundle.inputs) inputs.logit_index = int64([1, 1], [tokens.length - 1]);
    const { type, data } = (await decoder.step(inputs)).logits;
    const logits = widen({ type, data: data.slice(-ids.vocabulary) });
    const next = logits.reduce((best, value, at) => (value > logits[best] ? at : best), 0);
    yield next;
    if (ids.ends.includes(next)) return;
    tokens = [next];
  }
}

/** The ids that are written with commas; what is no id is -1. */
export const idsOf = (/** @type {string} */ text) =>
  text === '' ? [] : text.split(',').map((id) => (/^[0-9]+$/.test(id.trim()) ? Number(id) : -1));

/** The ids of tokens as text, with spaces between them. */
export async function* spaced(/** @type {AsyncIterable<number>} */ tokens) {
  let between = '';
  for await (const token of tokens) {
    yield `${between}${token}`;
    between = ' ';
  }
}

const int64 = (dims, values) => ({ type: 'int64', dims, data: BigInt64Array.from(values, BigInt) });

/**
 * Check what `generate` is given; see there.
 * @param {import('./bundle.mjs').Bundle} bundle
 * @param {number[]} prompt
 * @param {number} count
 */
export function checkPrompt({ ids }, prompt, count) {
  if (!ids) throw new BundleError('this bundle is no model that takes ids');
  if (prompt.length === 0) throw new BundleError('the prompt has no token');
  const isId = (id) => Number.isInteger(id) && id >= 0 && id < ids.vocabulary;
  const wrong = prompt.find((id) => !isId(id));
  if (wrong !== undefined) {
    throw new BundleError(`there is no token ${wrong}; ids are 0 to ${ids.vocabulary - 1}`);
  }
  if (!(Number.isInteger(count) && count > 0 && prompt.length + count - 1 <= ids.most)) {
    throw new BundleError(`${prompt.length} tokens and ${count} more: the bundle takes ${ids.most}`);
  }
}
