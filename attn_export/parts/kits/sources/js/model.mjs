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

  /** Release the memory of the graph. */
  async close() {
    await this.#session.release();
  }

  #toValue({ type, data, dims }) {
    if (type === 'bfloat16') throw new Error('ONNX Runtime for JavaScript has no bfloat16 tensors');
    const held = type === 'float16' ? asHalf(data) : data;
    return new this.#ort.Tensor(type, held, dims);
  }
}

/** A graph for any number of tokens and one for single tokens, with the same cache layout. */
export class TwoGraphs {
  #any;
  #single;
  #inputs;

  /**
   * @param {Model} any
   * @param {Model} single
   * @param {import('./bundle.mjs').Bundle["inputs"]} inputs  Of the signature.
   */
  constructor(any, single, inputs) {
    this.#any = any;
    this.#single = single;
    this.#inputs = inputs;
  }

  /** Run the graph that suits the number of tokens; see `Model.run`. */
  async run(inputs, bound = {}) {
    const isSingle = Object.entries(inputs).some(
      ([name, { dims }]) => dims[this.#inputs[name]?.shape.indexOf('query_len')] === 1,
    );
    // The graph for single tokens may require that the cache is written in place.
    const inPlace = Object.keys(bound).length > 0;
    return (isSingle && inPlace ? this.#single : this.#any).run(inputs, bound);
  }

  /** Release the memory of both graphs. */
  async close() {
    await this.#any.close();
    await this.#single.close();
  }
}

/** ONNX Runtime takes float16 as a Float16Array if the engine has that class, else as bits. */
function asHalf(bits) {
  if (typeof Float16Array === 'undefined') return bits;
  return new Float16Array(bits.buffer, bits.byteOffset, bits.length);
}

function toTensor({ type, data, dims }) {
  const held =
    type === 'float16' ? new Uint16Array(data.buffer, data.byteOffset, data.length) : data;
  return { type, data: held, dims: [...dims] };
}
