// A question that was sent, with a button that opens it for a change. Knows the turn's element, and no chat.

import { button, el } from './dom.js';
import { isBoard } from './board.js';

/** onSend(text) is called with what the question is to be; canEdit(): whether it may change now. */
export function makeEditable(element, text, { canEdit, onSend }) {
  const bubble = element.querySelector('.bubble');
  const open = button('Edit', () => { if (canEdit()) begin(); },
    { class: 'quiet edit', 'aria-label': 'Edit this message', title: 'Edit: what came after it is replaced' });
  bubble.before(open);

  function begin() {
    const field = el('textarea', { 'aria-label': 'The message', rows: 1, maxlength: 1_000_000, class: isBoard(text) ? 'mono' : '' });
    field.value = text;
    const restore = () => { form.replaceWith(bubble); open.hidden = false; }; // `undo` may show this element again
    const close = () => { restore(); open.focus(); };
    const form = el('form', { class: 'editing', 'aria-label': 'Edit the message' }, field,
      el('p', { class: 'row' }, el('span', { class: 'dim' }, 'What came after it is replaced.'),
        button('Cancel', close), el('button', { type: 'submit', class: 'strong' }, 'Send')));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      if (!canEdit() || !field.value.trim()) return;
      restore();
      onSend(field.value);
    });
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { event.stopPropagation(); close(); }
      if (event.key === 'Enter' && event.target === field && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    open.hidden = true;
    bubble.replaceWith(form);
    field.focus();
  }
}
