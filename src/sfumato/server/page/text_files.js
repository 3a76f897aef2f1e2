// Text files that a person gives with a question: read, bounded, and put into the message as text with their
// names. Knows files, and neither elements nor the server.

import { newId } from './dom.js';

export const MOST_BYTES = 200_000; // of a file
export const MOST_FILES = 8; // of a question

/** A file's text: { id, name, text }. Raises an Error for files that are no text, or too large. */
export async function textFileOf(file) {
  const name = [...(file.name || 'file')].slice(0, 100).join('');
  if (file.size > MOST_BYTES) throw new Error(`${name} has ${sizeOf(file.size)}; a text file may have ${sizeOf(MOST_BYTES)}.`);
  let text;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${name} is no text in UTF-8.`);
  }
  if (text.includes('\0')) throw new Error(`${name} is no text.`);
  if (!text.trim()) throw new Error(`${name} is empty.`);
  return { id: newId(), name, text: text.replaceAll('\r\n', '\n') };
}

/** Bytes as a person reads them. */
export const sizeOf = (bytes) => (bytes < 1000 ? `${bytes} B` : `${(bytes / 1000).toFixed(bytes < 10_000 ? 1 : 0)} kB`);

/** A message's text: each file with its name, in a fence that its text does not have, and then what was written. */
export function withFiles(text, files = []) {
  const blocks = files.map(({ name, text: content }) => {
    const longest = Math.max(2, ...[...content.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = '`'.repeat(longest + 1);
    return `File ${name}:\n${fence}\n${content.replace(/\n$/, '')}\n${fence}`;
  });
  return [...blocks, ...text ? [text] : []].join('\n\n');
}
