// Wires the page together: views, keyboard, composer, example prompts. The parts know each other
// only through here.

import { decide, loadModel, memory, props, slots, useKey, useModel, whenKeyIsRefused } from './api.js';
import { grid, isBoard, puzzleIn } from './board.js';
import { Chat } from './chat.js';
import { Conversations } from './conversations.js';
import { Dashboard } from './dashboard.js';
import { Decide } from './decide/view.js';
import { el } from './dom.js';
import { Edit } from './forming/edit.js';
import { Fill } from './forming/fill.js';
import { Json } from './forming/json.js';
import { Banner, tuckOnScroll } from './header.js';
import { Inspector } from './inspector.js';
import { Lock } from './lock.js';
import { Models } from './models.js';
import { filesIn, partsOf, Tray } from './pictures.js';
import { thumbnails } from './question.js';
import { Settings } from './settings.js';
import { loadMarkers, loadUnsent, saveMarkers, saveUnsent } from './store.js';
import { useMarkers } from './tokens.js';

const $ = (id) => document.getElementById(id);

useMarkers(loadMarkers()); // a conversation is drawn before the server has answered
const prompt = $('prompt');
const inspector = new Inspector($('inspector'));
const settings = new Settings($('settings'), (values) => useKey(values.key ?? ''));
const chat = new Chat($('turns'), { settings, inspector, onState: showState });
const tray = new Tray($('tray'), () => (seesPictures() ? chat.about.limits?.images ?? 1 : 0), { takesFiles: true });
const conversations = new Conversations($('conversations'), chat);
const dashboard = new Dashboard($('dashboard'), { slots, memory });
const decisions = new Decide($('decide'), { decide, hasKey: () => Boolean(settings.key) });
const modes = {
  fill: new Fill($('fill'), settings), json: new Json($('json'), settings), edit: new Edit($('edit'), settings),
};

const models = new Models($('models'), switchTo);
const banner = new Banner($('demonstration'));
tuckOnScroll(document.querySelector('.top'));
const lock = new Lock($('locked'), { onKey: (key) => { settings.key = key; meetServer(); } });
whenKeyIsRefused(() => { lock.close(Boolean(settings.key)); showView(viewOfAddress()); });

function showState() {
  $('send').hidden = chat.isRunning;
  $('stop').hidden = !chat.isRunning;
  $('welcome').hidden = !chat.isEmpty;
  $('new').disabled = chat.isEmpty || $('chat').hidden;
  $('undo').firstElementChild.hidden = !chat.canUndo;
  $('full').hidden = !chat.isFull;
}

function send(text, attached = null) {
  const sent = chat.send(text, attached ?? tray.take());
  if (!attached) write(''); // an example leaves what was written
  showState();
  return sent;
}

function undo() {
  chat.undo();
  prompt.focus();
}

function write(text) {
  prompt.value = text;
  saveUnsent(text);
  grow();
}

/** The box is as high as what is written, within reason (see max-height). */
function grow() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight}px`;
}

const AGAIN_MS = 2000; // until a server that loads a model is asked once more
let problem = ''; // why the model that was chosen last is not loaded
const VIEWS = ['chat', ...Object.keys(modes), 'decide', 'engine'];

/** The view that the address names after its #: a link to a view works, and so does going back. */
const viewOfAddress = () => VIEWS.find((name) => location.hash === `#${name}`) ?? 'chat';

function showView(name) {
  for (const view of VIEWS) $(view).hidden = lock.isClosed || view !== name;
  $('composer').hidden = $('undo').hidden = lock.isClosed || name !== 'chat';
  $('new').disabled = name !== 'chat' || chat.isEmpty;
  for (const tab of document.querySelectorAll('.tab[data-view]')) {
    tab.setAttribute('aria-pressed', String(tab.dataset.view === name));
  }
  if (name !== 'chat') inspector.close();
  dashboard.watch(name === 'engine' && !lock.isClosed);
  decisions.watch(name === 'decide' && !lock.isClosed);
}

async function meetServer() {
  let about;
  try {
    about = await props();
  } catch (error) {
    const isLoading = error.status === 503; // a model, perhaps for another client
    say(error.status === 401 ? '' : isLoading ? problem || error.message : 'server not reached', isLoading);
    if (isLoading) setTimeout(meetServer, AGAIN_MS);
    return;
  }
  if (lock.isClosed) {
    lock.open();
    showView(viewOfAddress());
    if (viewOfAddress() === 'chat') prompt.focus();
  }
  chat.about = about;
  document.querySelector('#attach .camera').hidden = !seesPictures();
  useMarkers(about.markers);
  saveMarkers(about.markers);
  const choice = models.meet(about.model, about.models);
  useModel(choice);
  say(problem || (choice ? '' : about.model ?? ''), Boolean(problem));
  banner.say(about.demonstration ?? '');
  const { max_steps: steps, max_tokens: tokens } = about.limits ?? {};
  settings.suggest({ ...about.sampler, max_tokens: tokens },
    { max_tokens: about.context_length, max_steps: steps });
  decisions.meet(about.decisions, seesPictures() ? tray.most() : 0);
  const able = { ...about.modes, decide: about.decisions };
  for (const [name, mode] of Object.entries(modes)) if (able[name]) mode.meet(able[name]);
  for (const name of [...Object.keys(modes), 'decide']) {
    // A tab stays where it is; what this model cannot do is disabled.
    document.querySelector(`[data-view="${name}"]`).disabled = !able[name];
    document.querySelector(`[data-mode="${name}"]`).hidden = !able[name];
    if (!able[name] && viewOfAddress() === name) location.replace('#chat');
  }
  $('examples').replaceChildren(...(about.examples ?? []).map(example));
}

/** Words beside the title; isNotice: small screens show them too. */
function say(text, isNotice = false) {
  $('model').textContent = text;
  $('model').classList.toggle('notice', isNotice);
}

/** Has another model loaded, in the place of the one that is. */
async function switchTo(name) {
  problem = '';
  useModel(name); // what is sent from now on waits for it
  say(`loading ${name} …`, true);
  try {
    await loadModel(name);
  } catch (error) {
    problem = error.message;
  }
  await meetServer();
}

/** A prompt to try, as a button that sends it. */
function example({ title, messages }) {
  const { text, pictures } = partsOf(messages.at(-1).content);
  const puzzle = puzzleIn(text);
  const sample = puzzle ? grid(puzzle)
    : el('span', { class: isBoard(text) ? 'sample board' : 'sample' }, text);
  return el('li', {}, el('button', { type: 'button', class: 'example', on: { click: () => send(text, { pictures }) } },
    title === text ? '' : el('span', { class: 'title' }, title), thumbnails(pictures) ?? '', sample));
}

/** Whether the server's model reads pictures. */
const seesPictures = () => Boolean(chat.about.modalities?.vision);

async function attach(files) {
  await tray.add(files);
  prompt.focus();
}

for (const input of document.querySelectorAll('#attach input')) {
  input.addEventListener('change', () => { attach([...input.files]); input.value = ''; });
}
prompt.addEventListener('paste', (event) => {
  const files = filesIn(event.clipboardData);
  if (!files.length) return;
  event.preventDefault();
  attach(files);
});
for (const name of ['dragover', 'drop']) {
  addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes('Files')) return;
    event.preventDefault(); // else the browser leaves the page and shows the file
    const files = name === 'drop' ? filesIn(event.dataTransfer) : [];
    if (files.length && !$('chat').hidden) attach(files);
    if (files.length && !$('decide').hidden) decisions.give(files);
  });
}

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  if (!chat.isRunning) send(prompt.value);
});
prompt.addEventListener('input', () => write(prompt.value));
prompt.addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.isRunning) send(prompt.value);
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !document.querySelector('dialog[open]')) {
    if (chat.isRunning && !$('chat').hidden) { chat.stop(); prompt.focus(); } else inspector.close();
  }
  const undoes = event.key === 'z' && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey;
  // With something written, the key is the box's own.
  if (undoes && chat.canUndo && !$('chat').hidden && prompt.value === '' && !document.querySelector('dialog[open]')) {
    event.preventDefault();
    undo();
  }
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  // With nothing written there is nothing to move through, and the arrows replay.
  const isWriting = event.target === prompt
    ? prompt.value !== '' : event.target.closest('input, textarea, dialog, .scroller');
  const taken = isWriting || event.altKey || event.metaKey || event.ctrlKey || event.shiftKey;
  if (by && !taken && !$('chat').hidden && !chat.isRunning) {
    event.preventDefault();
    chat.last?.shift(by);
  }
});
$('stop').addEventListener('click', () => { chat.stop(); prompt.focus(); });
$('new').addEventListener('click', () => { chat.clear(); prompt.focus(); });
$('undo').addEventListener('click', (event) => { if (event.target.closest('button')) undo(); });
$('open-conversations').addEventListener('click', () => conversations.open());
$('open-settings').addEventListener('click', () => $('settings').showModal());
$('settings').addEventListener('close', meetServer); // perhaps with a key by now
$('theme').addEventListener('click', () => {
  window.setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
});
for (const tab of document.querySelectorAll('.tab[data-view]')) {
  tab.addEventListener('click', () => { location.hash = tab.dataset.view; });
}
const scrolled = {}; // how far down each view is
let shown = viewOfAddress();
addEventListener('hashchange', () => {
  scrolled[shown] = scrollY;
  shown = viewOfAddress();
  showView(shown);
  scrollTo(0, scrolled[shown] ?? 0);
});
document.querySelector('.skip').addEventListener('click', (event) => {
  event.preventDefault(); // the address names the view
  const name = viewOfAddress();
  const first = modes[name]?.firstField;
  (first ?? { chat: prompt, decide: $('state'), engine: $('engine') }[name]).focus();
});

write(loadUnsent());
showState();
showView(viewOfAddress());
meetServer();
if (viewOfAddress() === 'chat' && !matchMedia('(pointer: coarse)').matches) prompt.focus();
