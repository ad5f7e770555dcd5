/**
 * Runs headless Chromium until stdin ends: `node browser.mjs FOLDER CHROMIUM KIND URL`.
 *
 * Then it ends Chromium with all its processes and removes the folder that they wrote to, even if the
 * process that started this program was killed.
 */

import { spawn } from 'node:child_process';
import { existsSync, rmSync } from 'node:fs';

const QUIET = [
  '--headless',
  '--remote-debugging-pipe', // at whose end it ends, if this program is killed
  '--no-first-run',
  '--no-default-browser-check',
  '--disable-background-networking',
  '--disable-background-timer-throttling',
  '--disable-breakpad',
  '--disable-component-update',
  '--disable-default-apps',
  '--disable-dev-shm-usage',
  '--disable-extensions',
  '--disable-sync',
  '--password-store=basic',
];
const STDIO = ['ignore', 'ignore', 'pipe'];

// Without a GPU, SwiftShader computes in software.
const GPU = existsSync('/dev/dri/renderD128');
const ADAPTER = GPU ? '--enable-features=Vulkan' : '--use-webgpu-adapter=swiftshader';
const FOR_WEBGPU = ['--enable-unsafe-webgpu', ADAPTER];

function main(folder, chromium, kind, url) {
  const extra = kind === 'webgpu' ? FOR_WEBGPU : ['--disable-gpu'];
  // In a container one is root, whom Chromium's sandbox refuses.
  const sandbox = process.getuid?.() === 0 ? ['--no-sandbox'] : [];
  const browser = spawn(
    chromium,
    [...QUIET, ...extra, ...sandbox, `--user-data-dir=${folder}`, url],
    // Its own group, so that it can be ended as a whole.
    { stdio: [...STDIO, 'pipe', 'pipe'], detached: true, env: environmentIn(folder) },
  );
  let said = '';
  browser.stderr.on('data', (data) => (said = (said + data).slice(-2000)));
  for (const pipe of browser.stdio.slice(STDIO.length)) pipe.on('error', () => {}).resume?.();
  browser.on('error', (error) => finish(`cannot start ${chromium}: ${error.message}`));
  browser.on('close', (code) => finish(`Chromium ended with ${code}: ${lastLine(said)}`));
  const end = () => {
    if (browser.pid) process.kill(-browser.pid, 'SIGKILL');
  };
  process.stdin.on('end', end).on('error', end).resume();

  function finish(why) {
    if (!process.stdin.readableEnded) console.error(why);
    rmSync(folder, { recursive: true, force: true, maxRetries: 20, retryDelay: 50 });
    process.exit(0);
  }
}

/** The environment of Chromium, whose home and temporary files are in its folder, too. */
const environmentIn = (folder) => ({ ...process.env, HOME: folder, TMPDIR: folder });

const lastLine = (text) => text.trim().split('\n').at(-1);

main(...process.argv.slice(2));
