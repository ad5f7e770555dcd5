#!/usr/bin/env node
/** Continues a prompt with a whole model: `node src/generate.mjs ID,ID,… [TOKENS]`, or `--text TEXT`. */

import { loadGraphs } from './engine.mjs';
import { generateCommand } from './generate_command.mjs';

await generateCommand(loadGraphs);
