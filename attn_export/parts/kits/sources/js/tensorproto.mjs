/**
 * Reads ONNX TensorProto files, as test cases are stored.
 * https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
 */

import { fromBytes, typeOf } from './dtypes.mjs';
import { fields, packed } from './protobuf.mjs';

const DIMS = 1;
const DATA_TYPE = 2;
const NAME = 8;
const RAW_DATA = 9;
const MOST_DIMS = 8;
const LARGEST_DIM = 2 ** 31 - 1;

const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/**
 * Read one tensor.
 * @param {Uint8Array} bytes  The file.
 * @returns {{name: string, tensor: import('./dtypes.mjs').Tensor}}
 */
export function readTensor(bytes) {
  const dims = [];
  let code = 0;
  let name = '';
  let raw = new Uint8Array();
  for (const [field, value] of fields(bytes)) {
    const isNumber = typeof value === 'number';
    if (field === DIMS) dims.push(...(isNumber ? [value] : packed(value)));
    else if (field === DATA_TYPE && isNumber) code = value;
    else if (field === NAME && !isNumber) name = UTF8.decode(value);
    else if (field === RAW_DATA && !isNumber) raw = value;
  }
  if (dims.length > MOST_DIMS || dims.some((size) => size > LARGEST_DIM)) {
    throw new Error(`no tensor has the dims ${dims}`.slice(0, 100));
  }
  return { name, tensor: fromBytes(typeOf(code), dims, raw) };
}
