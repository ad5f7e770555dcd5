#!/usr/bin/env node
/**
 * Server of this folder: `npm start`, or `node server.mjs [PORT]`.
 *
 * Any other server works too. Threads in WebAssembly need the two headers below.
 */

import { createReadStream } from 'node:fs';
import { stat } from 'node:fs/promises';
import { createServer } from 'node:http';
import { extname, join, sep } from 'node:path';
import { fileURLToPath } from 'node:url';

const TYPES = {
  '.html': 'text/html; charset=utf-8',
  '.mjs': 'text/javascript; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.json': 'application/json',
  '.wasm': 'application/wasm',
};

/** Headers of cross-origin isolation, without which threads of a page cannot share memory. */
const HEADERS = {
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cross-Origin-Embedder-Policy': 'require-corp',
  'Cache-Control': 'no-cache',
};

/**
 * Answer with a file.
 * @param {import('node:http').ServerResponse} response
 * @param {string} folder  The folder of the files; nothing outside it is sent.
 * @param {string} path  The path in the URL, with slashes, percent-encoded.
 */
export async function sendFile(response, folder, path) {
  const file = fileIn(folder, path);
  const found = file && (await stat(file).catch(() => null));
  if (!found?.isFile()) {
    response.writeHead(404, HEADERS).end('not found\n');
    return;
  }
  const type = TYPES[extname(file)] ?? 'application/octet-stream';
  response.writeHead(200, { ...HEADERS, 'Content-Type': type, 'Content-Length': found.size });
  createReadStream(file).on('error', () => response.destroy()).pipe(response);
}

function fileIn(folder, path) {
  try {
    const file = join(folder, decodeURIComponent(path));
    const inside = file.startsWith(folder.endsWith(sep) ? folder : folder + sep);
    return inside && !file.includes('\0') ? file : null;
  } catch {
    return null; // the percent-encoding is invalid
  }
}

function main(port) {
  const folder = fileURLToPath(new URL('.', import.meta.url));
  const server = createServer((request, response) => {
    const { pathname } = new URL(request.url, 'http://localhost');
    sendFile(response, folder, pathname === '/' ? '/index.html' : pathname);
  });
  server.on('error', (error) => {
    console.error(`cannot serve: ${error.message}; give another port: npm start -- 8081`);
    process.exitCode = 1;
  });
  server.listen(port, '127.0.0.1', () => {
    console.log(`open http://127.0.0.1:${server.address().port}/`);
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  main(Number(process.argv[2] ?? process.env.PORT ?? 8080));
}
