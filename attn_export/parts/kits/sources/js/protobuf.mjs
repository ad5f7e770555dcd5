/**
 * Reader of protobuf messages, with the parts of the format that ONNX files need.
 * https://protobuf.dev/programming-guides/encoding/
 */

const VARINT = 0;
const FIXED64 = 1;
const BYTES = 2;
const FIXED32 = 5;
const LARGEST_FIELD = 2 ** 29 - 1;

/**
 * The fields of a message: their numbers and values.
 * @param {Uint8Array} bytes
 * @returns {Generator<[number, number | Uint8Array]>}
 */
export function* fields(bytes) {
  const cursor = { at: 0 };
  while (cursor.at < bytes.length) {
    const key = varint(bytes, cursor);
    const number = Math.floor(key / 8);
    const kind = key % 8;
    if (number < 1 || number > LARGEST_FIELD) throw new Error('no protobuf message');
    if (kind === VARINT) {
      yield [number, varint(bytes, cursor)];
      continue;
    }
    const length = lengthOf(kind, bytes, cursor);
    if (cursor.at + length > bytes.length) throw new Error('the message was cut off');
    yield [number, bytes.subarray(cursor.at, cursor.at + length)];
    cursor.at += length;
  }
}

/**
 * The numbers of a packed field.
 * @param {Uint8Array} bytes
 */
export function* packed(bytes) {
  const cursor = { at: 0 };
  while (cursor.at < bytes.length) yield varint(bytes, cursor);
}

function lengthOf(kind, bytes, cursor) {
  if (kind === BYTES) return varint(bytes, cursor);
  if (kind === FIXED64) return 8;
  if (kind === FIXED32) return 4;
  throw new Error('no protobuf message');
}

/** Read a varint of 64 bits. Numbers of more than 53 bits are inexact; none of them is used. */
function varint(bytes, cursor) {
  let value = 0;
  for (let scale = 1; cursor.at < bytes.length && scale < 2 ** 70; scale *= 128) {
    const byte = bytes[cursor.at++];
    value += (byte & 0x7f) * scale;
    if (byte < 0x80 && !(scale === 2 ** 63 && byte > 1)) return value;
  }
  throw new Error('the message was cut off');
}
