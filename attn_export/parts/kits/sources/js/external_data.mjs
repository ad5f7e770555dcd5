/** Names of the files with a graph's weights, which a browser has to fetch separately. */

import { fields } from './protobuf.mjs';

// Numbers of fields in onnx.proto.
const MODEL = { graph: 7 };
const GRAPH = { node: 1, initializer: 5 };
const NODE = { attribute: 5 };
const ATTRIBUTE = { graph: 6, graphs: 11 };
const TENSOR = { externalData: 13 };
const ENTRY = { key: 1, value: 2 };

/**
 * The names of the files that initialisers of a graph refer to, without duplicates.
 * @param {Uint8Array} model  The `.onnx` file.
 * @returns {string[]}
 */
export function externalFiles(model) {
  const found = new Set();
  for (const graph of within(model, MODEL.graph)) visit(graph, found);
  return [...found];
}

function visit(graph, found) {
  for (const tensor of within(graph, GRAPH.initializer)) {
    const entries = [...within(tensor, TENSOR.externalData)].map(keyAndValue);
    for (const [key, value] of entries) if (key === 'location') found.add(value);
  }
  for (const node of within(graph, GRAPH.node)) {
    for (const attribute of within(node, NODE.attribute)) {
      for (const inner of within(attribute, ATTRIBUTE.graph, ATTRIBUTE.graphs)) visit(inner, found);
    }
  }
}

function keyAndValue(entry) {
  const text = (number) => new TextDecoder().decode([...within(entry, number)][0]);
  return [text(ENTRY.key), text(ENTRY.value)];
}

function* within(message, ...numbers) {
  for (const [number, value] of fields(message)) if (numbers.includes(number)) yield value;
}
