// What survives a reload: conversations, the forms of the other modes and the settings, in this browser alone. The API key and
// the unsent text are kept until the tab is closed. Knows no DOM.

const TALK = 'sfumato.conversation.', CURRENT = 'sfumato.current', SETTINGS = 'sfumato.settings', KEY = 'sfumato.key';
const UNSENT = 'sfumato.unsent', MARKERS = 'sfumato.markers', DECISION = 'sfumato.decision';
const MODE = 'sfumato.mode.', DISMISSED = 'sfumato.dismissed';

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // storage is off, or holds something else
  }
}

/** Whether it was kept. */
function write(storage, name, text) {
  try {
    storage.setItem(name, text);
    return true;
  } catch (error) {
    console.info('not kept:', error.message); // full, or off
    return false;
  }
}

function forget(name) {
  try {
    localStorage.removeItem(name);
  } catch { /* storage is off: nothing is in it */ }
}

const ROOM = 4_500_000; // characters of all conversations; browsers have five million for a site
const FORMS = [(turn) => turn, withoutTop, withoutDrafts];

export const MOST_CONVERSATIONS = 200;

/** The conversations: [{ id, title, changed, turns }], what changed last first. */
export const conversations = () => ids().map(loadConversation).filter(Boolean).sort((a, b) => b.changed - a.changed);

/** One of them; null where there is none. */
export function loadConversation(id) {
  const found = read(localStorage, TALK + id, null);
  if (!Array.isArray(found?.turns)) return null;
  return { id, title: String(found.title ?? ''), changed: Number(found.changed) || 0, turns: found.turns };
}

export const removeConversation = (id) => forget(TALK + id);

/** The conversation that this tab shows, as its id; else the one that changed last; '' where there is none. */
export const loadCurrent = () => read(sessionStorage, CURRENT, null) ?? conversations()[0]?.id ?? '';

export const saveCurrent = (id) => write(sessionStorage, CURRENT, JSON.stringify(id));

/**
 * Keeps a conversation, and says whether there was room. Where there is none, other conversations lose the
 * drafts of their replies, the oldest first; then older replies of this one lose first their most probable
 * tokens, then their drafts, and questions the full pictures; none ever loses its text.
 */
export function saveConversation({ id, title, changed, turns }) {
  const others = ids().filter((other) => other !== id);
  if (others.length >= MOST_CONVERSATIONS) return false;
  const sizes = new Map(others.map((other) => [other, size(other)]));
  let room = ROOM - [...sizes.values()].reduce((a, b) => a + b, 0);
  const whole = JSON.stringify({ title, changed, turns });
  if (whole.length <= room) return write(localStorage, TALK + id, whole);
  for (const other of conversations().toReversed()) {
    if (whole.length <= room) break;
    if (other.id === id) continue;
    const { title: name, changed: when, turns: kept } = other;
    const lean = JSON.stringify({ title: name, changed: when, turns: kept.map(withoutDrafts) });
    if (lean.length < sizes.get(other.id) && write(localStorage, TALK + other.id, lean)) {
      room += sizes.get(other.id) - lean.length;
    }
  }
  return write(localStorage, TALK + id, fitted({ title, changed }, turns, room));
}

/** A conversation within so many characters, as far as that goes: see `saveConversation`. */
function fitted(head, turns, most) {
  let room = most - JSON.stringify(head).length, form = 0;
  const kept = turns.toReversed().map((turn) => {
    for (;; form++) {
      const text = JSON.stringify(FORMS[form](turn));
      if (text.length > room && form < FORMS.length - 1) continue;
      room -= text.length + 1;
      return text;
    }
  });
  return `${JSON.stringify(head).slice(0, -1)},"turns":[${kept.reverse().join(',')}]}`;
}

function ids() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(TALK)).map((name) => name.slice(TALK.length));
  } catch {
    return []; // storage is off
  }
}

const size = (id) => localStorage.getItem(TALK + id)?.length ?? 0;

function withoutTop(turn) {
  if (!turn.canvases) return turn;
  const drafts = (canvas) => canvas.drafts.map((draft) => ({ ...draft, top: [] }));
  return { ...turn, canvases: turn.canvases.map((canvas) => ({ ...canvas, drafts: drafts(canvas) })) };
}

/** Of a question with pictures, the thumbnails stay. */
function withoutDrafts(turn) {
  if (turn.canvases) return { ...turn, canvases: [] };
  return { ...turn, pictures: turn.pictures?.map(({ name, thumb }) => ({ name, thumb })) };
}

export const loadSettings = () => ({ ...read(localStorage, SETTINGS, {}), key: read(sessionStorage, KEY, '') });

export function saveSettings({ key, ...settings }) {
  write(localStorage, SETTINGS, JSON.stringify(settings));
  write(sessionStorage, KEY, JSON.stringify(key ?? ''));
}

/** The markers of the chat format, as the server last named them. */
export const loadMarkers = () => read(localStorage, MARKERS, null) ?? {};

export const saveMarkers = (markers) => write(localStorage, MARKERS, JSON.stringify(markers ?? {}));

/** The note that was dismissed. */
export const loadDismissed = () => read(localStorage, DISMISSED, '');

export const saveDismissed = (text) => write(localStorage, DISMISSED, JSON.stringify(text));

/** The question that was written and not sent. */
export const loadUnsent = () => String(read(sessionStorage, UNSENT, ''));

export const saveUnsent = (text) => write(sessionStorage, UNSENT, JSON.stringify(text));

/** The state and the questions of the Decide view, as they were written; null where none were. */
export const loadDecision = () => read(localStorage, DECISION, null);

export const saveDecision = (content) => write(localStorage, DECISION, JSON.stringify(content));

/** What stands in the form of a mode (Fill, JSON, Edit); null where nothing was written. */
export const loadMode = (name) => read(localStorage, MODE + name, null);

export const saveMode = (name, values) => write(localStorage, MODE + name, JSON.stringify(values));
