// Reads the files that a test names on stdin; conformance.c describes the commands and the results.
import { readFileSync } from 'node:fs';

const { readTensor } = await import(process.argv[2]);
const { codeOf, toBytes } = await import(new URL('dtypes.mjs', `file://${process.argv[2]}`));

const hex = (bytes) => Buffer.from(bytes).toString('hex');

function read(path) {
  try {
    const { name, tensor } = readTensor(readFileSync(path));
    const found = [hex(new TextEncoder().encode(name)), codeOf(tensor.type), tensor.dims];
    return ['read', ...found, hex(toBytes(tensor))].join('\t');
  } catch (error) {
    return `refused\t${error.constructor.name}: ${error.message.replace(/\s/g, ' ')}`;
  }
}

const commands = readFileSync(0, 'utf8').split('\n').filter(Boolean);
console.log(commands.map((line) => read(line.split('\t')[1])).join('\n'));
