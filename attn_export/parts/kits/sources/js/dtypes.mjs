/**
 * Tensors in memory, and the types of elements in ONNX.
 *
 * @typedef {Float32Array | Float64Array | Int8Array | Uint8Array | Int16Array | Uint16Array |
 *   Int32Array | Uint32Array | BigInt64Array | BigUint64Array} Elements
 *
 * @typedef {object} Tensor
 * @property {string} type  As ONNX Runtime names it: "float32", "int64", "bool" …
 * @property {number[]} dims
 * @property {Elements} data  In C order. bool: a byte each; float16 and bfloat16: their bits.
 *
 * @typedef {Record<string, Tensor>} Tensors  By name.
 */

/** The name and the array class of each `TensorProto.DataType`. */
const TYPES = new Map([
  [1, { type: 'float32', array: Float32Array }],
  [2, { type: 'uint8', array: Uint8Array }],
  [3, { type: 'int8', array: Int8Array }],
  [4, { type: 'uint16', array: Uint16Array }],
  [5, { type: 'int16', array: Int16Array }],
  [6, { type: 'int32', array: Int32Array }],
  [7, { type: 'int64', array: BigInt64Array }],
  [9, { type: 'bool', array: Uint8Array }],
  [10, { type: 'float16', array: Uint16Array }],
  [11, { type: 'float64', array: Float64Array }],
  [12, { type: 'uint32', array: Uint32Array }],
  [13, { type: 'uint64', array: BigUint64Array }],
  [16, { type: 'bfloat16', array: Uint16Array }],
]);
const CODES = new Map([...TYPES].map(([code, { type }]) => [type, code]));

/** Epsilon of each floating point type: the distance from 1 to the next number. */
const EPS = new Map([
  ['float16', 2 ** -10], ['bfloat16', 2 ** -7], ['float32', 2 ** -23], ['float64', 2 ** -52],
]);

/** The array class for elements of a type. */
export const arrayOf = (/** @type {string} */ type) => TYPES.get(codeOf(type)).array;

/** The name of a type by its `TensorProto.DataType`. */
export function typeOf(/** @type {number} */ code) {
  const found = TYPES.get(code);
  if (!found) throw new Error(`elements of TensorProto.DataType ${code} are unknown here`);
  return found.type;
}

/** The `TensorProto.DataType` of a type. */
export function codeOf(/** @type {string} */ type) {
  const code = CODES.get(type);
  if (code === undefined) throw new Error(`elements of type ${type} are unknown here`);
  return code;
}

/** Returns whether a type is floating point. */
export const isFloating = (/** @type {string} */ type) => EPS.has(type);

/** The distance from 1 to the next number of a floating point type. */
export const epsOf = (/** @type {string} */ type) => EPS.get(type);

/** The number of elements of a tensor. */
export const sizeOf = (/** @type {number[]} */ dims) => dims.reduce((a, b) => a * b, 1);

/**
 * A tensor of zeros.
 * @param {string} type
 * @param {number[]} dims
 * @returns {Tensor}
 */
export const zeros = (type, dims) => ({ type, dims, data: new (arrayOf(type))(sizeOf(dims)) });

/**
 * A tensor from its bytes, which are little-endian and copied.
 * @param {string} type
 * @param {number[]} dims
 * @param {Uint8Array} bytes
 * @returns {Tensor}
 */
export function fromBytes(type, dims, bytes) {
  const array = arrayOf(type);
  const wanted = sizeOf(dims) * array.BYTES_PER_ELEMENT;
  if (bytes.length !== wanted) {
    throw new Error(`[${dims}] of ${type} takes ${wanted} bytes, there are ${bytes.length}`);
  }
  // Not `bytes.slice()`, which does not copy if `bytes` is a Buffer of Node.js.
  return { type, dims, data: new array(new Uint8Array(bytes).buffer) };
}

/** The bytes of a tensor, which share its memory. */
export const toBytes = (/** @type {Tensor} */ { data }) =>
  new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

/**
 * The elements of a tensor as numbers of 64 bits.
 * @param {Tensor} tensor
 * @returns {Float64Array}
 */
export function widen({ type, data }) {
  if (type === 'float16') return Float64Array.from(data, fromHalf);
  if (type === 'bfloat16') return fromBfloat16(data);
  return Float64Array.from(data, Number);
}

/** A number from the bits of a float16: sign, 5 bits of exponent, 10 of fraction. */
function fromHalf(/** @type {number} */ bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}

/** A bfloat16 is the upper half of a float32. */
function fromBfloat16(/** @type {Elements} */ data) {
  const bits = Uint32Array.from(data, (value) => value << 16);
  return Float64Array.from(new Float32Array(bits.buffer));
}
