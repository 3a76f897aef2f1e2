// What survives a reload: the conversation, the forms of the other modes and the settings, in this browser alone. The API key and
// the unsent text are kept until the tab is closed. Knows no DOM.

const TALK = 'sfumato.conversation', SETTINGS = 'sfumato.settings', KEY = 'sfumato.key';
const UNSENT = 'sfumato.unsent', MARKERS = 'sfumato.markers', DECISION = 'sfumato.decision';
const MODE = 'sfumato.mode.';

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // storage is off, or holds something else
  }
}

function write(storage, name, text) {
  try {
    storage.setItem(name, text);
  } catch (error) {
    console.info('not kept:', error.message); // full, or off
  }
}

export function loadTurns() {
  const found = read(localStorage, TALK, []);
  return Array.isArray(found) ? found : [];
}

const ROOM = 4_500_000; // characters; browsers have five million for a site
const FORMS = [(turn) => turn, withoutTop, withoutDrafts];

/**
 * Keeps the conversation. Where there is no room for all of it, older replies lose first their
 * most probable tokens, then their drafts, and questions their pictures; never their text.
 */
export function saveTurns(turns) {
  let room = ROOM, form = 0;
  const kept = turns.toReversed().map((turn) => {
    for (;; form++) {
      const text = JSON.stringify(FORMS[form](turn));
      if (text.length > room && form < FORMS.length - 1) continue;
      room -= text.length;
      return text;
    }
  });
  write(localStorage, TALK, `[${kept.reverse().join(',')}]`);
}

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

/** The question that was written and not sent. */
export const loadUnsent = () => String(read(sessionStorage, UNSENT, ''));

export const saveUnsent = (text) => write(sessionStorage, UNSENT, JSON.stringify(text));

/** The state and the questions of the Decide view, as they were written; null where none were. */
export const loadDecision = () => read(localStorage, DECISION, null);

export const saveDecision = (content) => write(localStorage, DECISION, JSON.stringify(content));

/** What stands in the form of a mode (Fill, JSON, Edit); null where nothing was written. */
export const loadMode = (name) => read(localStorage, MODE + name, null);

export const saveMode = (name, values) => write(localStorage, MODE + name, JSON.stringify(values));
