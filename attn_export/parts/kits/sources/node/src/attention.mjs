/** The public functions of this project, for your own program. */

export { open } from './files.mjs';
export { ENGINE, load, loadGraphs } from './engine.mjs';
export { Decoder, emptyPasts } from './decoding.mjs';
export { generate } from './generation.mjs';
export { openTexts } from './tokenizer.mjs';
export { BundleError, readCase } from './bundle.mjs';
export { zeros } from './dtypes.mjs';
