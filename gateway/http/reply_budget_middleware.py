"""reply_budget_middleware: counts replies of routes in the reply budget until the HTTP server has taken them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.connection.budgets import PERMIT, ReplyBudget, ReplyPermit


class ReplyBudgetMiddleware:
    """Counts a reply from the arrival of its tensors until the server has taken the reply written from them.

    Args:
        reply_budget: the gateway's reply budget.
    """

    def __init__(self, app: ASGIApp, reply_budget: ReplyBudget) -> None:
        self.app = app
        self._reply_budget = reply_budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        permit = ReplyPermit(self._reply_budget)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.body":
                permit.resize(len(message.get("body", b"")))
            await send(message)

        token = PERMIT.set(permit)
        try:
            await self.app(scope, receive, counted)
        finally:
            PERMIT.reset(token)
            permit.release()
