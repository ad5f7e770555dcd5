/** A graph in ONNX Runtime, in Node.js or a browser: tensors in, tensors out. */

/**
 * @typedef {import('./dtypes.mjs').Tensor} Tensor
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 */

/** A loaded graph. */
export class Model {
  #ort;
  #session;
  #binds;

  /**
   * @param {any} ort  The module: onnxruntime-node or onnxruntime-web.
   * @param {any} session  Its `InferenceSession`.
   * @param {boolean} binds  Whether it can write outputs into the memory of inputs.
   */
  constructor(ort, session, binds) {
    this.#ort = ort;
    this.#session = session;
    this.#binds = binds;
  }

  /**
   * Run once.
   * @param {Tensors} inputs  By name.
   * @param {Record<string, string>} [bound]  Outputs to put into the memory of an input.
   * @returns {Promise<Tensors>}  By name, in the graph's order.
   */
  async run(inputs, bound = {}) {
    const feeds = {};
    for (const [name, tensor] of Object.entries(inputs)) feeds[name] = this.#toValue(tensor);
    const fetches = {};
    for (const name of this.#session.outputNames) {
      fetches[name] = (this.#binds && feeds[bound[name]]) || null;
    }
    const values = await this.#session.run(feeds, fetches);
    const outputs = {};
    for (const name of this.#session.outputNames) outputs[name] = toTensor(values[name]);
    return outputs;
  }

  /** Let go of the graph's memory. */
  async close() {
    await this.#session.release();
  }

  #toValue({ type, data, dims }) {
    if (type === 'bfloat16') throw new Error('ONNX Runtime for JavaScript has no bfloat16 tensors');
    const held = type === 'float16' ? asHalf(data) : data;
    return new this.#ort.Tensor(type, held, dims);
  }
}

/** ONNX Runtime wants a Float16Array where there is one, and bits where there is none. */
function asHalf(bits) {
  if (typeof Float16Array === 'undefined') return bits;
  return new Float16Array(bits.buffer, bits.byteOffset, bits.length);
}

function toTensor({ type, data, dims }) {
  const held =
    type === 'float16' ? new Uint16Array(data.buffer, data.byteOffset, data.length) : data;
  return { type, data: held, dims: [...dims] };
}
