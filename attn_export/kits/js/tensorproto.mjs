/**
 * Reads ONNX TensorProto files, as golden vectors are stored.
 * https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
 */

import { fromBytes, typeOf } from './dtypes.mjs';
import { fields, packed } from './protobuf.mjs';

const DIMS = 1;
const DATA_TYPE = 2;
const NAME = 8;
const RAW_DATA = 9;

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
    if (field === DIMS) dims.push(...(typeof value === 'number' ? [value] : packed(value)));
    else if (field === DATA_TYPE) code = value;
    else if (field === NAME) name = new TextDecoder().decode(value);
    else if (field === RAW_DATA) raw = value;
  }
  return { name, tensor: fromBytes(typeOf(code), dims, raw) };
}
