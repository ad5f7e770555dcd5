/** The command of kits that continues a prompt, in Node.js: ids, or with --text a text. */

import { basename } from 'node:path';
import { BundleError } from './bundle.mjs';
import { open } from './files.mjs';
import { checkPrompt, generate, idsOf, spaced } from './generation.mjs';
import { oneLine } from './text.mjs';
import { openTexts } from './tokenizer.mjs';

const FLAG = '--text';

/**
 * Continue the prompt of the command line, and print what comes.
 * @param {(opened: Awaited<ReturnType<typeof open>>) => Promise<import('./model.mjs').Model>} load
 */
export async function generateCommand(load) {
  const [, program, ...words] = process.argv;
  const at = words.indexOf(FLAG);
  if (at >= 0) words.splice(at, 1);
  const [prompt, count = '64'] = words;
  try {
    if (prompt === undefined) {
      throw new BundleError(`usage: node ${basename(program)} ID,ID,... [TOKENS], or ${FLAG} TEXT [TOKENS]`);
    }
    const opened = await open();
    const { bundle } = opened;
    const texts = at >= 0 ? await openTexts(bundle) : null;
    const ids = texts ? texts.encode(prompt) : idsOf(prompt);
    checkPrompt(bundle, ids, Number(count)); // before a large model is loaded
    const tokens = generate(await load(opened), bundle, ids, Number(count));
    const pieces = texts ? texts.decode(ids, tokens) : spaced(tokens);
    for await (const piece of pieces) process.stdout.write(piece);
    process.stdout.write('\n');
    if (texts) console.error('no chat template applied');
  } catch (error) {
    console.error(oneLine(error));
    process.exitCode = 2;
  }
}
