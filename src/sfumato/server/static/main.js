// Wires the page together: views, keyboard, composer, example prompts. The parts know each other
// only through here.

import { memory, props, slots, useKey } from './api.js';
import { Chat } from './chat.js';
import { Dashboard } from './dashboard.js';
import { el } from './dom.js';
import { Inspector } from './inspector.js';
import { isBoard } from './message.js';
import { Settings } from './settings.js';

const $ = (id) => document.getElementById(id);

const prompt = $('prompt');
const inspector = new Inspector($('inspector'));
const settings = new Settings($('settings'), (values) => useKey(values.key ?? ''));
const chat = new Chat($('turns'), { settings, inspector, onState: showState });
const dashboard = new Dashboard($('dashboard'), { slots, memory });

function showState() {
  $('send').hidden = chat.isRunning;
  $('stop').hidden = !chat.isRunning;
  $('welcome').hidden = !chat.isEmpty;
  $('new').disabled = chat.isEmpty;
}

function send(text) {
  prompt.value = '';
  grow();
  const sent = chat.send(text);
  showState();
  return sent;
}

/** The box is as high as what is written, within reason (see max-height). */
function grow() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function showView(name) {
  $('chat').hidden = $('composer').hidden = name !== 'chat';
  $('engine').hidden = name !== 'engine';
  for (const tab of document.querySelectorAll('.tab')) {
    tab.setAttribute('aria-pressed', String(tab.dataset.view === name));
  }
  if (name === 'engine') inspector.close();
  dashboard.watch(name === 'engine');
}

async function meetServer() {
  let about;
  try {
    about = await props();
  } catch (error) {
    $('model').textContent = error.status === 401 ? 'enter the API key in the settings' : 'server not reached';
    return;
  }
  $('model').textContent = about.model ?? '';
  settings.suggest({ ...about.sampler, ...about.limits });
  $('examples').replaceChildren(...(about.examples ?? []).map(({ title, messages }) => {
    const text = messages.at(-1).content;
    return el('li', {}, el('button', { type: 'button', class: 'example', on: { click: () => send(text) } },
      title === text ? '' : el('span', { class: 'title' }, title),
      el('span', { class: isBoard(text) ? 'sample board' : 'sample' }, text)));
  }));
}

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send(prompt.value);
});
prompt.addEventListener('input', grow);
prompt.addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.isRunning) send(prompt.value);
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !$('settings').open) {
    if (chat.isRunning) { chat.stop(); prompt.focus(); } else inspector.close();
  }
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const taken = event.target.closest('input, textarea, dialog') || event.altKey || event.metaKey || event.ctrlKey;
  if (by && !taken && !$('chat').hidden && !chat.isRunning) {
    event.preventDefault();
    chat.last?.shift(by);
  }
});
$('stop').addEventListener('click', () => { chat.stop(); prompt.focus(); });
$('new').addEventListener('click', () => { chat.clear(); showState(); prompt.focus(); });
$('open-settings').addEventListener('click', () => $('settings').showModal());
$('settings').addEventListener('close', meetServer); // perhaps with a key by now
$('theme').addEventListener('click', () => {
  window.setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
});
for (const tab of document.querySelectorAll('.tab')) {
  tab.addEventListener('click', () => showView(tab.dataset.view));
}

showState();
meetServer();
if (!matchMedia('(pointer: coarse)').matches) prompt.focus();
