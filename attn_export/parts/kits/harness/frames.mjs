/**
 * Messages over the pipes, as the docstring of attn_export/parts/kits/program.py defines them.
 *
 * Lies beside the kit's modules where it is installed.
 *
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 * @typedef {{inputs: Tensors, bound: Record<string, string>}} Request
 */

import { codeOf, fromBytes, sizeOf, arrayOf, toBytes, typeOf } from './dtypes.mjs';

const NEWLINE = 10;
const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** Lines and bytes of a stream. */
export class Reader {
  #chunks;
  #rest = new Uint8Array();

  /** All that was read since the last `readRequest`, in pieces. */
  taken = [];

  /** @param {AsyncIterable<Uint8Array> | Iterable<Uint8Array>} chunks */
  constructor(chunks) {
    this.#chunks = (chunks[Symbol.asyncIterator] ?? chunks[Symbol.iterator]).call(chunks);
  }

  /** The next line without its end, or null at the end of the stream. */
  async line() {
    const parts = [];
    for (;;) {
      const end = this.#rest.indexOf(NEWLINE);
      if (end >= 0) {
        parts.push(this.#take(end + 1));
        return decoder.decode(joined(parts)).slice(0, -1);
      }
      parts.push(this.#take(this.#rest.length));
      if (!(await this.#more())) return null;
    }
  }

  /** So many bytes. */
  async bytes(/** @type {number} */ count) {
    const parts = [];
    let missing = count;
    while (missing > 0) {
      if (this.#rest.length === 0 && !(await this.#more())) throw new Error('the input ended');
      const part = this.#take(Math.min(missing, this.#rest.length));
      parts.push(part);
      missing -= part.length;
    }
    return joined(parts);
  }

  #take(count) {
    const part = this.#rest.subarray(0, count);
    this.#rest = this.#rest.subarray(count);
    if (part.length) this.taken.push(part);
    return part;
  }

  async #more() {
    const { done, value } = await this.#chunks.next();
    if (!done) this.#rest = value;
    return !done;
  }
}

/**
 * The next request, or null at the end of the stream.
 * @param {Reader} reader
 * @returns {Promise<Request | null>}
 */
export async function readRequest(reader) {
  reader.taken = [];
  const line = await reader.line();
  if (line === null) return null;
  const [word, tensors, pairs] = line.split(' ');
  if (word !== 'run') throw new Error(`"${line.slice(0, 80)}" where "run" was due`);
  const request = { inputs: {}, bound: {} };
  for (let i = 0; i < Number(tensors); i++) {
    const { name, tensor } = await readTensor(reader);
    request.inputs[name] = tensor;
  }
  for (let i = 0; i < Number(pairs); i++) {
    const [output, input] = (await reader.line()).split('\t');
    request.bound[output] = input;
  }
  return request;
}

async function readTensor(reader) {
  const [code, rank, ...rest] = (await reader.line()).split(' ');
  const dims = rest.slice(0, Number(rank)).map(Number);
  const type = typeOf(Number(code));
  const bytes = await reader.bytes(sizeOf(dims) * arrayOf(type).BYTES_PER_ELEMENT);
  return { name: rest.slice(Number(rank)).join(' '), tensor: fromBytes(type, dims, bytes) };
}

/** The message that the graph is loaded. */
export const loaded = (/** @type {object} */ facts) => `loaded ${JSON.stringify(facts)}\n`;

/** The answer to a request that failed. */
export const failure = (/** @type {unknown} */ error) =>
  `error ${`${error?.message ?? error}`.replace(/\s+/g, ' ').slice(0, 2000)}\n`;

/**
 * The answer to a request.
 * @param {Tensors} outputs
 * @returns {Uint8Array}
 */
export function answer(outputs) {
  const parts = [encoder.encode(`outputs ${Object.keys(outputs).length}\n`)];
  for (const [name, tensor] of Object.entries(outputs)) {
    const { type, dims } = tensor;
    parts.push(encoder.encode(`${[codeOf(type), dims.length, ...dims, name].join(' ')}\n`));
    parts.push(toBytes(tensor));
  }
  return joined(parts);
}

/** Pieces as one. */
export function joined(/** @type {Uint8Array[]} */ parts) {
  if (parts.length === 1) return parts[0];
  const whole = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
