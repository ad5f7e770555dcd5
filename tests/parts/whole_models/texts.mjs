/** Encodes texts and decodes ids by a kit's code: `node texts.mjs KIT < {tokenizer, texts, ids}`. */

import { readFile } from 'node:fs/promises';
import { text } from 'node:stream/consumers';

const { tokenizer, texts, ids } = JSON.parse(await text(process.stdin));
const { openTexts } = await import(`${process.argv[2]}/src/attention.mjs`);
const opened = await openTexts({ ids: { text: true }, read: () => readFile(tokenizer) });
const pieces = [];
for await (const piece of opened.decode(ids[0], ids[1])) pieces.push(piece);
console.log(JSON.stringify({ ids: texts.map((each) => opened.encode(each)), pieces }));
