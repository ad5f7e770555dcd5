/** Text as token ids, and tokens as text, by the tokenizer of a bundle. No chat template is applied. */

import { BundleError, readJson } from './bundle.mjs';
import { oneLine, printableLines } from './text.mjs';

const FILE = 'tokenizer.json';
const PACKAGE = '../node_modules/@huggingface/tokenizers/dist/tokenizers.min.mjs';

/** What stands for bytes that are no character yet. */
const BROKEN = '\ufffd';

/** The number of tokens before the first new one that it is decoded with, as spaces depend on it. */
const CONTEXT = 6;

/**
 * Read the tokenizer of a bundle.
 * @param {import('./bundle.mjs').Bundle} bundle
 * @returns {Promise<Texts>}
 * @throws {BundleError} If there is none, or it cannot be read.
 */
export async function openTexts(bundle) {
  if (!bundle.ids?.text) throw new BundleError(`the bundle has no ${FILE}; give token ids`);
  const content = await readJson(bundle.read, FILE);
  const { Tokenizer } = await import(PACKAGE);
  try {
    return new Texts(new Tokenizer(content, {}));
  } catch (error) {
    throw new BundleError(`${FILE} is no tokenizer: ${oneLine(error)}`);
  }
}

/** A tokenizer. */
export class Texts {
  #tokenizer;

  constructor(/** @type {any} */ tokenizer) {
    this.#tokenizer = tokenizer;
  }

  /** The token ids of a text. Characters without a token are left out. */
  encode(/** @type {string} */ text) {
    return this.#tokenizer.encode(text).ids.filter((id) => id !== undefined);
  }

  /**
   * The text of tokens as it grows, without control characters; bytes wait until they are a character.
   * @param {number[]} before  The tokens before them.
   * @param {AsyncIterable<number>} tokens
   * @returns {AsyncGenerator<string>}
   */
  async *decode(before, tokens) {
    const ids = before.slice(-CONTEXT);
    let [start, shown] = [0, ids.length];
    const added = () => this.#text(ids.slice(start)).slice(this.#text(ids.slice(start, shown)).length);
    for await (const token of tokens) {
      ids.push(token);
      const text = added();
      if (text === '' || text.endsWith(BROKEN)) continue;
      yield printableLines(text);
      [start, shown] = [shown, ids.length];
    }
    yield printableLines(added());
  }

  #text(ids) {
    const known = ids.filter((id) => this.#tokenizer.id_to_token(id) !== undefined);
    const options = { skip_special_tokens: true, clean_up_tokenization_spaces: false };
    return known.length ? this.#tokenizer.decode(known, options) : '';
  }
}
