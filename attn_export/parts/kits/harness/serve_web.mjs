/**
 * Serves a graph with onnxruntime-web: `node serve_web.mjs CHROMIUM KIND GRAPH THREADS`.
 *
 * Speaks as the docstring of attn_export/parts/kits/program.py says. A page in headless Chromium
 * asks this program for requests and posts answers; both travel as they come over the pipes. KIND
 * is "wasm" or "webgpu".
 */

import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { Reader, joined, readRequest } from './lib/frames.mjs';
import { sendFile } from './server.mjs';

const HERE = fileURLToPath(new URL('.', import.meta.url));

/** Hands requests to the page when it asks, and its answers to stdout. */
class Page {
  /** A random path, so that no other process of this machine can guess where the graph is served. */
  root = `/${randomUUID()}/`;
  #graph;
  #reader = new Reader(process.stdin);

  constructor(/** @type {string} */ graph) {
    this.#graph = graph;
  }

  /** Answer one request of the page. */
  async handle(request, response) {
    const { pathname } = new URL(request.url, 'http://localhost');
    if (!pathname.startsWith(this.root)) return void response.writeHead(404).end();
    const path = pathname.slice(this.root.length);
    if (path === 'next') return this.#next(response);
    if (path === 'answer') return this.#answer(request, response);
    // Stays open while the page lives.
    if (path === 'alive') return void response.on('close', () => this.#died());
    if (path.startsWith('graph/')) {
      return sendFile(response, dirname(resolve(this.#graph)), path.slice('graph'.length));
    }
    return sendFile(response, HERE, `/${path}`);
  }

  /** If the whole browser has died, who keeps it says why, and cleans up. */
  async #died() {
    await setTimeout(3000);
    giveUp('the page has died');
  }

  async #next(response) {
    if ((await readRequest(this.#reader)) === null) process.exit(0);
    response.writeHead(200).end(joined(this.#reader.taken));
  }

  async #answer(request, response) {
    const parts = [];
    for await (const part of request) parts.push(part);
    process.stdout.write(joined(parts));
    response.writeHead(204).end();
  }
}

/** Ends with a line that no answer starts with: nothing more will come from this program. */
function giveUp(why) {
  process.stdout.write(`${why}\n`);
  process.exit(1);
}

/** Sockets lie in the folder too, and the path of one may have 107 characters. */
const place = () => (tmpdir().length <= 40 ? tmpdir() : '/tmp');

function main(chromium, kind, graph, threads) {
  process.stdout.on('error', () => process.exit(0)); // the reader has ended
  const page = new Page(graph);
  const server = createServer((request, response) => {
    page.handle(request, response).catch((error) => giveUp(error.message));
  });
  server.listen(0, '127.0.0.1', () => {
    const { port } = server.address();
    const query = new URLSearchParams({ kind, threads, graph: basename(graph) });
    const url = `http://127.0.0.1:${port}${page.root}harness.html?${query}`;
    const folder = mkdtempSync(join(place(), 'attn-export-'));
    // A process of its own: it ends Chromium and removes its folder however this one ends.
    const browser = spawn(process.execPath, [`${HERE}browser.mjs`, folder, chromium, kind, url], {
      stdio: ['pipe', 'ignore', 'pipe'],
      detached: true,
    });
    let said = '';
    browser.stderr.on('data', (data) => (said += data));
    browser.on('close', async (code, signal) => {
      if (signal) await setTimeout(1500); // it was killed, and Chromium is about to end by itself
      rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 });
      giveUp(said.trim().split('\n').at(-1) || 'Chromium has ended');
    });
  });
}

main(...process.argv.slice(-4));
